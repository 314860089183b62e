"""The sweep: a beat task that registers itself, and interrupts claims whose worker never came back."""

from __future__ import annotations

import logging
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

from celery_idempotent import signals
from celery_idempotent.errors import InvalidOption
from celery_idempotent.policy import milliseconds
from celery_idempotent.signals import Event, emit
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["SWEEP", "install", "sweep"]

logger = logging.getLogger(__name__)

#: The name of the task, and of its entry in the beat schedule.
SWEEP = "celery_idempotent.sweep"

#: The most records that one sweep looks at: the next one goes on where it stopped.
LIMIT = 10_000

_installed: weakref.WeakSet[Celery] = weakref.WeakSet()
_installing = threading.Lock()


def sweep(app: Celery, *, limit: int = LIMIT, sender: object = None) -> dict[str, Any]:
    """Interrupt stale claims and prune what is past its retention; return the counts.

    Safe to run on any number of machines at once: whether a claim is stale is decided by the store at the moment of the
    write. ``more`` says that ``limit`` left work for the next sweep.

    Raises:
        StoreUnavailable: if the store did not answer; the next sweep does the work.
    """
    store = get_store(app)
    started = time.monotonic()
    report = store.sweep(limit=limit)
    pruned = store.prune(limit=limit)
    for record in report.interrupted:
        logger.warning(
            "idempotency: %s was stale and is interrupted: %s did not come back (crash %d)",
            record.identity,
            record.owner,
            record.crashes,
        )
        event = Event(
            task=record.identity.namespace,
            task_id=record.task_id,
            identity=record.identity,
            record=record,
        )
        emit(signals.interrupted, sender, event)
    count = len(report.interrupted)
    emit(signals.swept, sender, Event(task=SWEEP, count=count))
    level = logging.INFO if count or pruned else logging.DEBUG
    seconds = round(time.monotonic() - started, 4)
    logger.log(
        level, "idempotency: sweep interrupted %d, pruned %d in %.3f s", count, pruned, seconds
    )
    return {"interrupted": count, "pruned": pruned, "more": report.more, "seconds": seconds}


def install(app: Celery) -> None:
    """Give ``app`` the sweep task and its beat entry, once, as soon as its tasks are complete.

    Raises:
        InvalidOption: for a bad ``idempotency_sweep_interval``.
    """
    interval = _interval(app)
    with _installing:
        if app in _installed:
            return
        _installed.add(app)
    if vars(app)["finalized"]:
        _register(app, interval)
    else:
        # Not at once: the app may be walking through its tasks right now.
        app.on_after_finalize.connect(lambda **_: _register(app, interval), weak=False)


def _interval(app: Celery) -> float | None:
    value = app.conf.get("idempotency_sweep_interval", 30)
    if value is None:
        return None
    try:
        interval = milliseconds(value)
    except ValueError as error:
        raise InvalidOption(
            f"idempotency_sweep_interval {error}, or None to switch it off."
        ) from None
    if interval < 100:
        raise InvalidOption("idempotency_sweep_interval takes at least 0.1 seconds, or None.")
    return interval / 1000


def _register(app: Celery, interval: float | None) -> None:
    from celery import Task

    # Not shared: Celery would hand it to every other app of the process.
    @app.task(name=SWEEP, base=Task, bind=True, shared=False, ignore_result=False, acks_late=False)
    def sweep_task(self: Any, limit: int = LIMIT) -> dict[str, Any]:
        return sweep(self.app, limit=limit, sender=self)

    if interval is None or SWEEP in app.conf.beat_schedule:
        return
    # A tick that no worker took before the next one is of no use any more.
    entry = {"task": SWEEP, "schedule": interval, "options": {"expires": max(interval, 1.0)}}
    app.conf.beat_schedule = {**app.conf.beat_schedule, SWEEP: entry}
