"""A shop whose tasks do what a file of their order's name says: one app for all histories that ``explain`` tells."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_idempotent import IdempotentTask
from tests.support.apps import configure, environment, hurry, wanted

__all__ = ["MOODS", "CardDeclined", "environment", "make_app"]

#: The environment variable that names the directory of these files.
MOODS = "HISTORIES_MOODS"


class CardDeclined(Exception):
    """The bank will never accept this card."""


def make_app(settings: Mapping[str, Any], *, prefix: str = "") -> Celery:
    """Return the app, with a task for each policy that a history is about."""
    app = Celery("shop", set_as_current=False)
    configure(app, settings, prefix)
    task = partial(
        app.task,
        base=IdempotentTask,
        bind=True,
        shared=False,
        idempotency_key="order",
        idempotency_permanent_errors=(CardDeclined,),
    )
    task(name="shop.charge")(work)
    task(name="shop.invoice", idempotency_on_conflict="wait")(work)
    task(name="shop.book", idempotency_on_conflict="raise")(work)
    task(name="shop.stamp", idempotency_on_conflict="ignore")(work)
    task(name="shop.remind", idempotency_publish_once=True)(work)
    task(name="shop.ship", idempotency_on_stale="requeue")(work)
    task(name="shop.refund", idempotency_on_stale="fail")(work)
    task(name="shop.greet", idempotency_retention=1)(work)
    task(name="shop.print", idempotency_max_result_bytes=8)(work)
    app.task(name="shop.mail", base=Task, shared=False)(mail)
    return app


def mail(order: str) -> str:
    """Do what another task left to this one."""
    return f"mailed {order}"


def work(self: Any, order: str, amount: int = 100) -> dict[str, Any]:
    """Charge an amount; what comes of it the order's file says, for as long as it is there."""
    file = Path(os.environ[MOODS]) / order
    mood = file.read_text() if file.exists() else ""
    if mood == "pay, then hold":
        self.idempotency.step("pay", lambda: f"ch_{order}")
    if mood.endswith("hold"):
        while file.exists():
            time.sleep(0.05)
    if mood == "retry":
        file.unlink()
        raise self.retry(countdown=1)
    if mood == "fail":
        raise RuntimeError("no route to the bank")
    if mood == "decline":
        raise CardDeclined("the card expired")
    if mood == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if mood == "replace":
        raise self.replace(self.app.tasks["shop.mail"].si(order))
    return {"charge": f"ch_{order}", "amount": amount}


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"])
    if MOODS in os.environ:
        from celery.signals import worker_ready

        worker_ready.connect(hurry, weak=False)
