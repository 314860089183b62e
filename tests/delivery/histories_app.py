"""The app of the histories: steps that have something to send, and faults between their body and their ack.

A file ``closed-<label>`` is a closed gate. A file ``<fault>-<point>-<label>`` lets one process meet that fault when it
comes to that point of the work on a label. At each point whatever is raised strikes the code around it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task, current_task
from celery.backends.redis import RedisBackend
from celery.signals import task_postrun, task_prerun, task_received, worker_ready

from celery_idempotent import IdempotentTask, get_store, signals
from tests.support.apps import configure, hurry, wanted
from tests.support.ledger import LEDGER_VARIABLE, Ledger

#: In the order in which a step comes to them. ``stored``: the result is, the part of a chord is not returned.
POINTS = (
    *("body", "settling", "settled", "sending", "sent"),
    *("storing", "stored", "marking", "acking"),
)
#: What a process meets; one that ``holds`` waits for a file ``on-<label>``.
FAULTS = ("dies", "soft limit", "holds")
#: What a duplicate does that meets a run.
POLICIES = ("retry", "wait", "ignore", "raise")

#: What this process is working on.
_label = ""


class Refused(Exception):
    """Fails for good."""


class Sending(IdempotentTask):
    """A task whose sending is a point of the work on what sends it."""

    abstract = True

    def apply_async(self, *given: Any, **options: Any) -> Any:
        current: Any = current_task
        own = current and (current.name, current.request.id)
        if (self.name, options.get("task_id")) == own:  # a message that comes back
            return super().apply_async(*given, **options)
        meet("sending")
        result = super().apply_async(*given, **options)
        meet("sent")
        return result


class Backend(RedisBackend):
    """A result backend with the points before the result and before the part of a chord."""

    def store_result(self, *args: Any, **kwargs: Any) -> Any:
        meet("storing")
        return super().store_result(*args, **kwargs)

    def on_chord_part_return(self, *args: Any, **kwargs: Any) -> Any:
        meet("stored")
        return super().on_chord_part_return(*args, **kwargs)


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Return an app with every task of the histories."""
    app = Celery("histories", set_as_current=False)
    configure(app, settings)
    for suffix, late in (("", True), ("_early", False)):
        task = partial(app.task, base=Sending, shared=False, bind=True, acks_late=late)
        task(name=f"step{suffix}")(step)
        task(name=f"refuse{suffix}", idempotency_permanent_errors=(Refused,))(refuse)
        task(name=f"swap{suffix}")(swap)
        task = partial(task, idempotency_key="label", idempotency_wait=60)
        for policy in POLICIES:
            name = f"{policy}_{'late' if late else 'early'}"
            refusing: dict[str, Any] = {"idempotency_permanent_errors": (Refused,)}
            task(name=name, idempotency_on_conflict=policy, **refusing)(keyed)
    brief: dict[str, Any] = {"idempotency_retention": 4, "idempotency_lease": 2}
    app.task(name="brief", base=Sending, shared=False, bind=True, **brief)(step)
    for follower in (mourn, after):
        app.task(name=follower.__name__, base=Sending, shared=False)(follower)
    app.task(name="plain", base=Task, shared=False, bind=True)(step)
    return app


def step(self: Any, *given: Any) -> str:
    """Append the letter of the label; the last argument is the label, ``key/letter``."""
    *before, label = given
    begin(self, label)
    said = "".join("".join(each) if isinstance(each, list) else str(each) for each in before)
    return said + str(label).rsplit("/", 1)[1]


def refuse(self: Any, label: str) -> None:
    """Fail for good."""
    begin(self, label)
    raise Refused(label)


def swap(self: Any, label: str, queue: str) -> None:
    """Let a step do it."""
    begin(self, label)
    raise self.replace(self.app.tasks["step"].s(f"{label}'").set(queue=queue))


def keyed(self: Any, label: str, mood: str = "", aside: str = "") -> str:
    """Do what the mood says, but for a refusal only the first time; no two runs return the same.

    The message of a retry waits in the queue ``aside``.
    """
    begin(self, label)
    first = Ledger.from_env().count("effect", label) == 1
    match mood:
        case "refused":
            raise Refused(label)
        case "fails" if first:
            raise ValueError(label)
        case "retries" if first:
            raise self.retry(countdown=0, queue=aside)
    Ledger.from_env().append("end", label, self.request.id)
    return uuid.uuid4().hex


def after(value: Any, label: str) -> Any:
    """Follow a task with a key, or be the body of its chord."""
    Ledger.from_env().append("after", label)
    return value


def mourn(failed: str, *, label: str) -> None:
    """Note that a task failed."""
    Ledger.from_env().append("effect", label)


def begin(task: Any, label: str) -> None:
    Ledger.from_env().append("effect", label, task.request.id)
    _wait(lambda: not file("closed", label).exists())
    meet("body")


def _wait(condition: Any) -> None:
    until = time.monotonic() + 150
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def file(kind: str, label: str) -> Path:
    """Return the file by which a test tells a worker something."""
    return Path(os.environ[LEDGER_VARIABLE]).parent / f"{kind}-{label.replace('/', '.')}"


def meet(point: str) -> None:
    """Meet the fault that waits at this point, if there is one, and only once."""
    if not _label:
        return
    for fault in FAULTS:
        with contextlib.suppress(FileNotFoundError):
            file(f"{fault}-{point}", _label).unlink()
            Ledger.from_env().append(fault, f"{point} {_label}")
            if fault == "holds":
                _wait(file("on", _label).exists)
            else:
                os.kill(os.getpid(), signal.SIGKILL if fault == "dies" else signal.SIGUSR1)


def _between(store: Any, verb: str, before: str, after: str = "") -> None:
    real = getattr(store, verb)

    def called(*args: Any, **kwargs: Any) -> Any:
        meet(before)
        answer = real(*args, **kwargs)
        meet(after)
        return answer

    setattr(store, verb, called)


def _watch(app: Celery) -> None:
    worker_ready.connect(hurry, weak=False)
    task_prerun.connect(_turn_to, weak=False)
    task_received.connect(_received, weak=False)
    task_postrun.connect(lambda **_: meet("acking"), weak=False)
    for name in ("conflicted", "replayed"):
        getattr(signals, name).connect(partial(_told, name), weak=False)
    store = get_store(app)
    _between(store, "settle", "settling", "settled")
    _between(store, "mark_delivered", "marking")


def label_of(args: Any, kwargs: Any) -> str:
    """Return the label of a message with these arguments."""
    found = (each for each in (*args, *kwargs.values()) if isinstance(each, str) and "/" in each)
    return next(found, "")


def _received(request: Any, **_: Any) -> None:
    """Note in the main process that a message came, and that it is acknowledged."""
    acknowledge = request._on_ack

    def noting(*args: Any) -> None:
        acknowledge(*args)
        Ledger.from_env().append("acked", "", request.id)

    request._on_ack = noting
    Ledger.from_env().append("received", "", request.id)


def _turn_to(task_id: str, args: Any, **_: Any) -> None:
    global _label
    _label = label_of(args, {})
    Ledger.from_env().append("begun", "", task_id)


def _told(name: str, *, event: signals.Event, **_: Any) -> None:
    Ledger.from_env().append(name, "", event.task_id)


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"])
    _watch(app)
