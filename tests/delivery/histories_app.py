"""The app of the tests of sending: steps whose followers go to queues that can be refused, and crashes in between.

A file ``closed-<label>`` is a closed gate, a file ``crash-<point>-<label>`` lets one process die at that point of the
work on a label. The points, in the order in which a step comes to them: ``settled``, ``sending`` (before its first
message), ``sent`` (after it), ``stored`` (the result is, its chord part is not returned), ``marking``, ``marked``.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.backends.redis import RedisBackend
from celery.signals import (
    after_task_publish,
    before_task_publish,
    task_failure,
    task_prerun,
    task_success,
    worker_ready,
)

from celery_idempotent import IdempotentTask, get_store, signals
from celery_idempotent.celery import republish
from tests.support.apps import hurry
from tests.support.ledger import LEDGER_VARIABLE, Ledger

CONF = "SENDING_CONF"
POINTS = ("settled", "sending", "sent", "stored", "marking", "marked")

#: What this process is working on.
_label = ""


class Refused(Exception):
    """Fails for good."""


class Backend(RedisBackend):
    """A result backend at which a process may die between the result and the part of the chord."""

    def on_chord_part_return(self, *args: Any, **kwargs: Any) -> Any:
        crash("stored")
        return super().on_chord_part_return(*args, **kwargs)


def make_app(conf: dict[str, Any]) -> Celery:
    """Return an app with every task of these tests."""
    app = Celery("sending", set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=2,
        # Not as long as an outage lasts, but known.
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0.1},
        idempotency_sweep_interval=None,
        idempotency_lease=30,
        worker_prefetch_multiplier=1,
    )
    republish._LONGEST.update(dict.fromkeys(republish._LONGEST, 2.0))
    app.conf.update(conf)
    for suffix, late in (("", True), ("_early", False)):
        task = partial(app.task, base=IdempotentTask, shared=False, bind=True, acks_late=late)
        task(name=f"step{suffix}")(step)
        task(name=f"refuse{suffix}", idempotency_permanent_errors=(Refused,))(refuse)
        task(name=f"swap{suffix}")(swap)
    brief: dict[str, Any] = {"idempotency_retention": 4, "idempotency_lease": 2}
    app.task(name="brief", base=IdempotentTask, shared=False, bind=True, **brief)(step)
    app.task(name="mourn", base=IdempotentTask, shared=False)(mourn)
    app.task(name="plain", base=Task, shared=False, bind=True)(step)
    app.task(name="fence", base=Task, shared=False)(fence)
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


def mourn(failed: str, *, label: str) -> None:
    """Note that a task failed."""
    Ledger.from_env().append("effect", label)


def fence() -> None:
    """Do nothing."""


def begin(task: Any, label: str) -> None:
    ledger = Ledger.from_env()
    ledger.append("effect", label, task.request.id)
    gate = _file("closed", label)
    until = time.monotonic() + 60
    while gate.exists() and time.monotonic() < until:
        time.sleep(0.01)


def _file(kind: str, label: str) -> Path:
    return Path(os.environ[LEDGER_VARIABLE]).parent / f"{kind}-{label.replace('/', '.')}"


def crash(point: str) -> None:
    """Take this process down, if a file says so, and only once."""
    with contextlib.suppress(FileNotFoundError):
        _file(f"crash-{point}", _label).unlink()
        Ledger.from_env().append("crash", f"{point} {_label}")
        os.kill(os.getpid(), signal.SIGKILL)


def _watch(app: Celery) -> None:
    app.finalize()  # receivers of the library come before those of the tests
    worker_ready.connect(hurry, weak=False)
    task_prerun.connect(_turn_to, weak=False)
    signals.settled.connect(lambda **_: crash("settled"), weak=False)
    before_task_publish.connect(_sending, weak=False)
    after_task_publish.connect(lambda **_: crash("sent"), weak=False)
    task_success.connect(lambda **_: crash("marked"), weak=False)
    task_failure.connect(_failed, weak=False)
    store: Any = get_store(app)
    mark = store.mark_delivered

    def marking(*args: Any, **kwargs: Any) -> Any:
        crash("marking")
        return mark(*args, **kwargs)

    store.mark_delivered = marking


def label_of(args: Any, kwargs: Any) -> str:
    """Return the label of a message with these arguments."""
    found = (each for each in (*args, *kwargs.values()) if isinstance(each, str) and "/" in each)
    return next(found, "")


def _turn_to(args: Any, **_: Any) -> None:
    global _label
    _label = label_of(args, {})


def _sending(headers: Any, **_: Any) -> None:
    if not headers["eta"]:  # else it is a message that comes back
        crash("sending")


def _failed(sender: Any, task_id: str, **_: Any) -> None:
    Ledger.from_env().append("failure", sender.name, task_id)
    crash("marked")


if CONF in os.environ:
    app = make_app(json.loads(os.environ[CONF]))
    _watch(app)
