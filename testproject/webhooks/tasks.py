"""The same work twice: as an ``IdempotentTask`` and as Celery's own ``Task``."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from celery import Task
from django.conf import settings
from django.db import OperationalError, transaction
from django.dispatch import Signal

from celery_idempotent import IdempotentTask
from celery_idempotent.signals import Event, claimed
from testproject.celery import app
from testproject.webhooks.models import Kind, LedgerEntry, Run

#: Sent inside each run, before its write, with ``run=``. The demo listens and makes it take its time.
about_to_write = Signal()
#: Sent after the write, with ``run=``. With records in the database it is not committed yet.
written = Signal()

# A locked SQLite file passes; anything else is for a person to look at.
_WHEN_LOCKED: dict[str, Any] = {
    "autoretry_for": (OperationalError,),
    "retry_backoff": 1,
    "max_retries": 5,
}


@app.task(
    bind=True,
    base=IdempotentTask,
    idempotency_key="delivery_id",
    idempotency_atomic=settings.WEBHOOKS_ATOMIC,
    ignore_result=True,
    **_WHEN_LOCKED,
)
def record_delivery(self: Task[Any, Any], delivery_id: str, event: str, action: str = "") -> int:
    """Enter a delivery into the ledger, however often it is delivered, redelivered or killed."""
    return _record(Kind.IDEMPOTENT, self, delivery_id, event, action)


@app.task(
    bind=True,
    base=Task,
    # What Celery's documentation advises so that nothing is lost. Nothing is; but see the ledger.
    acks_late=True,
    reject_on_worker_lost=True,
    ignore_result=True,
    **_WHEN_LOCKED,
)
def record_delivery_plain(
    self: Task[Any, Any], delivery_id: str, event: str, action: str = ""
) -> int:
    """Enter a delivery into the ledger."""
    return _record(Kind.PLAIN, self, delivery_id, event, action)


@claimed.connect
def note_start(event: Event, **_: Any) -> None:
    """Note that a run starts, before its transaction does: whatever becomes of that, it did start."""
    if event.task == record_delivery.name and event.identity is not None:
        _start(Kind.IDEMPOTENT, event.identity.key, event.task_id)


def _start(kind: Kind, delivery_id: str, task_id: str) -> Run:
    return Run.objects.create(kind=kind, delivery_id=delivery_id, task_id=task_id, pid=os.getpid())


def _noted(delivery_id: str, task_id: str) -> Run:
    """Return the run that :func:`note_start` noted, or note it now: not every run has a claim."""
    kind, pid = Kind.IDEMPOTENT, os.getpid()
    runs = Run.objects.filter(kind=kind, delivery_id=delivery_id, task_id=task_id, pid=pid)
    return runs.filter(entry=None).order_by("pk").last() or _start(kind, delivery_id, task_id)


def _record(kind: Kind, task: Task[Any, Any], delivery_id: str, event: str, action: str) -> int:
    task_id = str(task.request.id)
    begin = _noted if kind is Kind.IDEMPOTENT else partial(_start, kind)
    run = begin(delivery_id, task_id)
    about_to_write.send(sender=task, run=run)
    with transaction.atomic():
        entry = LedgerEntry.objects.create(
            kind=kind,
            delivery_id=delivery_id,
            event=event,
            action=action,
            run=run,
            task_id=task_id,
            pid=run.pid,
        )
    written.send(sender=task, run=run)
    return entry.pk
