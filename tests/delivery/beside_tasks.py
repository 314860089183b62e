"""The app of both sides, which a worker makes from its environment and a test for itself, and its tasks."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, chain, group, signature
from celery.exceptions import Ignore, Reject
from celery.worker.request import Request

from tests.delivery.recorder import Recorder, note, watch
from tests.support.apps import wait_at, wanted

PLAIN = "celery.app.task:Task"
OURS = "celery_idempotent:IdempotentTask"


def make_app(task_cls: str, conf: dict[str, Any]) -> Celery:
    """Return an app with every task of the scenarios, all of the given class."""
    app = Celery("documented", task_cls=task_cls, set_as_current=False)
    app.conf.update(conf)
    _register_classes(app)
    _register_options(app)
    task = partial(app.task, shared=False)
    for function in (add, mul, tsum, echo, fail, fail_if, nothing, quiet, old):
        task(name=f"tests.{function.__name__}")(function)
    for bound in (show, spawns, replaced, extends, bound_old):
        task(name=f"tests.{bound.__name__}", bind=True)(bound)
    task(name="tests.new")(new)
    task(name="tests.fence", ignore_result=True)(nothing)
    task(name="tests.untyped", typing=False)(add)
    task(name="tests.elsewhere")(nothing)
    return app


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


class LoudRequest(Request):
    """A request class of one's own, as documents show it."""

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        super().on_timeout(soft, timeout)
        note("on_timeout", soft, timeout, request=self)

    def on_failure(
        self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False
    ) -> Any:
        note("on_failure", repr(exc_info.exception), request=self)
        return super().on_failure(
            exc_info, send_failed_event=send_failed_event, return_ok=return_ok
        )


_SOON: dict[str, Any] = {"default_retry_delay": 0.3}


def _register_classes(app: Celery) -> None:
    """Define them on an app, whose own class they inherit from."""
    task = partial(app.task, shared=False)
    base: Any = app.Task

    class Handled(base):
        """Every handler there is."""

        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            note("before_start", task_id, args, kwargs)

        def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
            note("on_success", retval, task_id, args, kwargs, self.AsyncResult(task_id).state)

        def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            state = self.AsyncResult(task_id).state
            note("on_failure", repr(exc), task_id, args, kwargs, bool(einfo), state)

        def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
            note("on_retry", repr(exc), task_id, args, kwargs, bool(einfo))

        def after_return(
            self, status: str, retval: Any, task_id: str, args: Any, kwargs: Any, einfo: Any
        ) -> None:
            note("after_return", status, repr(retval), task_id, args, kwargs, bool(einfo))

    class Calling(base):
        """Its own ``__call__``."""

        abstract = True

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            note("called", args)
            return super().__call__(*args, **kwargs)

    class Broken(base):
        """A handler that fails."""

        abstract = True

        def on_success(self, *args: Any) -> None:
            raise RuntimeError("a handler that fails")

    task(name="tests.handled", base=Handled, bind=True, acks_late=True, **_SOON)(works)
    task(name="tests.calling", base=Calling)(echo)
    task(name="tests.broken", base=Broken)(echo)
    own = {"Request": "tests.delivery.beside_tasks:LoudRequest"}
    task(name="tests.requested", bind=True, time_limit=1, acks_late=False, **own)(works)


def _register_options(app: Celery) -> None:
    """Define them on an app."""
    task = partial(app.task, shared=False)
    for name, options in _RETRYING.items():
        task(name=f"tests.{name}", bind=True, **options)(retries)
    for name, options in _AUTORETRYING.items():
        task(name=f"tests.{name}", bind=True, **options)(raises)
    for name, options in _WORKING.items():
        task(name=f"tests.{name}", bind=True, **options)(works)
    # Celery's class takes these options for attributes that mean nothing to it.
    keyed: dict[str, Any] = {"idempotency_key": "key", "idempotency_on_conflict": "ignore"}
    task(name="tests.keyed", **keyed)(waits_once)


_RETRYING: dict[str, dict[str, Any]] = {
    "retries": {"default_retry_delay": 0.3},
    "retries_quietly": {"ignore_result": True, "default_retry_delay": 0.3},
}

_AUTORETRYING: dict[str, dict[str, Any]] = {
    "autoretries": {
        "autoretry_for": (KeyError,),
        "retry_kwargs": {"max_retries": 2, "countdown": 0.3},
    },
    "backs_off": {
        "autoretry_for": (KeyError,),
        "retry_backoff": 1,
        "retry_backoff_max": 1,
        "retry_jitter": False,
        "max_retries": 2,
    },
    "jitters": {
        "autoretry_for": (KeyError,),
        "retry_backoff": True,
        "retry_backoff_max": 1,
        "max_retries": 1,
    },
}

_WORKING: dict[str, dict[str, Any]] = {
    "works": {},
    "works_late": {"acks_late": True},
    "works_early": {"acks_late": False, "reject_on_worker_lost": False},
    "works_lost_late": {"acks_late": True, "reject_on_worker_lost": False},
    "works_unacked": {"acks_late": True, "acks_on_failure_or_timeout": False},
    "works_ignored": {"ignore_result": True},
    "works_softly": {"soft_time_limit": 1},
    "works_hard": {"time_limit": 1, "acks_late": False},
    "works_hard_late": {"time_limit": 1},
    "works_off": {"idempotency_mode": "off"},
}


def retries(self: Any, times: int, how: str = "", x: Any = None) -> Any:
    """Retry so many times, one way or another."""
    note("retries", self.request.retries, self.max_retries)
    if self.request.retries >= times:
        return [self.request.retries, x]
    if how == "exc":
        try:
            raise KeyError(times)
        except KeyError as error:
            raise self.retry(exc=error) from None
    if how == "args":
        raise self.retry(args=(times, how, "changed"), kwargs={})
    if how == "options":
        raise self.retry(priority=5, time_limit=77, headers={"by": "retry"})
    raise self.retry()


def raises(self: Any, error: str, times: int = 99) -> int:
    """Raise an error in the first so many runs."""
    note("run", self.request.retries)
    random.seed(0)  # of the jitter
    if self.request.retries < times:
        raise {"key": KeyError, "value": ValueError, "index": IndexError}[error](error)
    return int(self.request.retries)


def works(self: Any, how: str = "", *args: Any) -> Any:
    """Do as told, or end with an exception that may be no failure."""
    redelivered = bool((self.request.delivery_info or {}).get("redelivered"))
    note("how", how, self.request.retries, redelivered)
    match how:
        case "sleeps":
            time.sleep(30)
        case "waits":
            wait_at(args[0])
        case "catches":
            try:
                time.sleep(30)
            except SoftTimeLimitExceeded:
                return "caught"
        case "dies" if not redelivered:
            os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(30)
        case "fails":
            raise ValueError(how)
        case "retries" if not self.request.retries:
            raise self.retry(exc=ValueError(how))
        case "ignores":
            raise Ignore("by hand")
        case "stores":
            self.update_state(state="SUCCESS", meta="by hand")
            raise Ignore
        case "rejects":
            raise Reject("by hand", requeue=False)
        case "requeues" if not redelivered:
            raise Reject("once more", requeue=True)
    return f"{how} again" if redelivered else how


def waits_once(key: str, gate: str) -> str:
    note("keyed", key)
    wait_at(gate)
    return "done"


if _wanted := wanted():
    app = make_app(_wanted["task_cls"], _wanted["settings"])
    app.set_default()
    app.set_current()
    watch(Recorder(_wanted["record"]))
