"""The tasks that scenarios call and put into canvases."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, chain, group, signature
from celery.utils.log import get_task_logger

from tests.delivery.recorder import note

logger = get_task_logger(__name__)


def register(app: Celery) -> None:
    """Define them on an app."""
    task = partial(app.task, shared=False)
    for function in (add, mul, tsum, echo, fail, fail_if, nothing, quiet, old):
        task(name=f"tests.{function.__name__}")(function)
    for bound in (show, spawns, replaced, extends, bound_old, from_request):
        task(name=f"tests.{bound.__name__}", bind=True)(bound)
    task(name="tests.new")(new)
    task(name="tests.fence", ignore_result=True)(nothing)
    task(name="tests.untyped", typing=False)(add)
    task(name="tests.elsewhere")(nothing)


def add(x: Any, y: Any = 0) -> Any:
    return x + y


def mul(x: Any, y: Any) -> Any:
    return x * y


def tsum(numbers: Any) -> Any:
    return sum(numbers)


def echo(*args: Any, **kwargs: Any) -> Any:
    return [list(args), kwargs]


def fail(*args: Any) -> Any:
    raise ValueError("no luck", *args)


def fail_if(x: Any, bad: Any = "bad") -> Any:
    if x == bad:
        raise KeyError(x)
    return x


def nothing(*args: Any) -> None:
    return None


def quiet(x: Any) -> Any:
    note("ran", x)
    return x


def old(task_id: str) -> str:
    """An errback of the old style: called as a task, with the id of the failed one."""
    note("errback", task_id)
    return task_id


def bound_old(self: Any, task_id: str) -> str:
    note("errback", task_id)
    return task_id


def new(request: Any, exc: Any, traceback: Any) -> None:
    """An errback of the new style: called as a function."""
    note("errback", request.id, repr(exc), bool(traceback), request=request)


def show(self: Any, *args: Any) -> Any:
    """Return what documents call the request."""
    request = self.request
    # But those of ours (announced: own-headers).
    own = "idempotency"
    headers = {k: v for k, v in (request.headers or {}).items() if not k.startswith(own)}
    assert self.name == "tests.show"
    return {
        "retries": request.retries,
        "eager": request.is_eager,
        "direct": request.called_directly,
        "headers": headers or None,
        "group": bool(request.group),
        "chord": bool(request.chord),
        "root is me": request.root_id == request.id,
        "parent": bool(request.parent_id),
        "limits": list(request.timelimit or ()),
        "args": list(request.args or ()),
        "queue": (request.delivery_info or {}).get("routing_key"),
        "priority": (request.delivery_info or {}).get("priority"),
        "stamps": request.stamps,
        "shadow": request.shadow,
        "more": list(args),
    }


def spawns(self: Any, add_to_parent: bool) -> str:
    result = self.app.tasks["tests.add"].apply_async((1, 1), add_to_parent=add_to_parent)
    return str(result.id)


def wait_at(gate: str) -> None:
    """Wait until the scenario opens its gate."""
    give_up = time.monotonic() + 60
    while not Path(gate).exists() and time.monotonic() < give_up:
        time.sleep(0.01)


def replaced(self: Any, how: str, x: Any) -> Any:
    """Have another task, or several, take over."""
    task = self.app.tasks
    plus, times = task["tests.add"], task["tests.mul"]
    sig: Any = {
        "task": lambda: plus.s(x, 10),
        "chain": lambda: chain(plus.s(x, 1), times.s(2)),
        "group": lambda: group([plus.s(x, 1), plus.s(x, 2)], app=self.app),
        "chord": lambda: group([plus.s(x, 1), plus.s(x, 2)], app=self.app) | task["tests.tsum"].s(),
        "again": lambda: self.s("task", x + 1),
        "failure": lambda: task["tests.fail"].si(x),
    }[how]()
    return self.replace(sig)


def extends(self: Any, x: int, more: bool = True) -> int:
    """Add a member to the chord that this one belongs to."""
    if more:
        self.add_to_chord(signature("tests.extends", args=(x, False), app=self.app))
    return x + 100


def from_request(self: Any, x: Any) -> Any:
    sig = self.signature_from_request(self.request, args=(x,), retries=2)
    return {k: v for k, v in sig.options.items() if isinstance(v, (int, str)) and k != "task_id"}
