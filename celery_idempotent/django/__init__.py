"""For Django projects: the task class that also has ``delay_on_commit`` and ``apply_async_on_commit``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from celery.contrib.django.task import DjangoTask

from celery_idempotent.task import IdempotentTask as _IdempotentTask

if TYPE_CHECKING:
    DjangoBase = DjangoTask[Any, Any]
else:
    DjangoBase = DjangoTask

__all__ = ["IdempotentTask"]


class IdempotentTask(_IdempotentTask, DjangoBase):
    """:class:`celery_idempotent.IdempotentTask`, with Celery's ways to publish after a commit."""

    abstract = True
