"""Our class with Celery's own defaults for acknowledgement: what differs then is not due to ours."""

from __future__ import annotations

from celery_idempotent.celery.task import IdempotentTask


class EarlyTask(IdempotentTask):
    abstract = True
    acks_late = False  # type: ignore[assignment]
    reject_on_worker_lost = False  # type: ignore[assignment]
