"""The app of the matrix: one body, as a task for each policy and each way to acknowledge."""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from celery_idempotent import IdempotentTask, signals
from tests.support.apps import configure, hurry, wait_at, wanted
from tests.support.ledger import LEDGER_VARIABLE, Ledger

POLICIES = ("retry", "wait", "ignore", "raise")
ACKS = ("late", "early")


class Refused(Exception):
    """The bank will never accept this card."""


def task_name(policy: str, acks: str) -> str:
    """Return the name of the task with this policy."""
    return f"{policy}.{acks}"


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Return an app with every task of the matrix."""
    app = Celery("matrix_tests", set_as_current=False)
    configure(app, settings)
    for policy, acks in itertools.product(POLICIES, ACKS):
        options: dict[str, Any] = {
            "idempotency_key": "key",
            "idempotency_on_conflict": policy,
            "idempotency_wait": 60,
            "idempotency_permanent_errors": (Refused,),
            "autoretry_for": (ZeroDivisionError,),
            "default_retry_delay": 3,
            "acks_late": acks == "late",
        }
        decorated = app.task(
            base=IdempotentTask, bind=True, shared=False, name=task_name(policy, acks), **options
        )
        decorated(work)
    downstream = partial(app.task, base=IdempotentTask, shared=False)
    downstream(name="after")(after)
    downstream(name="collect")(collect)
    return app


def work(self: Any, key: str, gate: str = "", mood: str = "", seconds: float = 0) -> dict[str, Any]:
    """Wait for the file ``gate``, then do what the mood says: an effect, unless it says otherwise."""
    ledger = Ledger.from_env()
    ledger.append("start", key, self.request.id)
    wait_at(gate, 150)
    time.sleep(seconds)
    first = ledger.count("start", key) == 1
    match mood:
        case "refused":
            raise Refused(f"the card of {key} expired", 4)
        case "fails once" if first:
            raise RuntimeError("not today")
        case "retries once" if first:
            raise self.retry(countdown=3)
        case "autoretries once" if first:
            return {"never": 1 / 0}
    ledger.append("effect", key, self.request.id)
    return {"run": uuid.uuid4().hex}


def after(value: dict[str, Any], label: str) -> dict[str, Any]:
    """Take a result on."""
    Ledger.from_env().append("after", label)
    return {**value, "label": label}


def collect(values: list[dict[str, Any]], label: str) -> list[str]:
    """Collect the results of a chord."""
    Ledger.from_env().append("collect", label)
    return sorted(value["run"] for value in values)


def _note(outcome: str, *, event: signals.Event, **_: Any) -> None:
    key = "" if event.identity is None else event.identity.key
    Ledger.from_env().append(outcome, key, event.task_id)


def _note_undelivered(line: logging.LogRecord) -> bool:
    """Note that a message of a finished task comes back: there is no signal of it."""
    again = ("are not all sent yet", "returns its part of a chord again")
    if any(words in str(line.msg) for words in again) and line.args:
        task_id = line.args["id"] if isinstance(line.args, Mapping) else line.args[1]
        Ledger.from_env().append("undelivered", "", str(task_id))
    return True


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"])
    if LEDGER_VARIABLE in os.environ:
        worker_ready.connect(hurry, weak=False)
        for _outcome in ("conflicted", "replayed", "interrupted", "lease_lost", "settle_failed"):
            getattr(signals, _outcome).connect(partial(_note, _outcome), weak=False)
        for _module in ("republish", "callbacks"):
            logger = logging.getLogger(f"celery_idempotent.celery.{_module}")
            logger.addFilter(_note_undelivered)
