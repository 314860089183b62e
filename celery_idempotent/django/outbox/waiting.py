"""What waits in the outbox, for operators: which messages there are, and how one of them is given up."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass

from celery_idempotent.django.outbox import rows
from celery_idempotent.django.outbox.models import NowMs

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A message that waits, for operators: what it is, since when, and why it was not sent.

    ``error`` is class and message of the last failure, empty if there was none. ``due_in_ms``: when a sweep may take
    its group; below zero, it waits for one.
    """

    id: int
    group: str
    app: str
    task: str
    task_id: str
    key: str
    scope: str
    attempts: int
    error: str
    age_ms: int
    due_in_ms: int


def pending(
    *, using: str = "default", limit: int = 100, scopes: Collection[str] | None = None
) -> list[Pending]:
    """Return the messages that wait, oldest first; only those of ``scopes`` (canonical), if these are given."""
    staged = rows.rows(using)
    if scopes is not None:
        staged = staged.filter(scope__in=scopes)
    waiting = staged.annotate(now_ms=NowMs()).defer("payload").order_by("pk")[:limit]
    copied = ("group", "app", "task", "task_id", "key", "scope", "attempts", "error")
    return [
        Pending(
            id=each.pk,
            **{name: getattr(each, name) for name in copied},
            age_ms=max(each.now_ms - each.created_ms, 0),
            due_in_ms=each.due_ms - each.now_ms,
        )
        for each in waiting
    ]


def oldest_ms(*, using: str | None) -> int | None:
    """Return for how long the oldest message waits; ``None`` if none does, or without a database (``using``)."""
    waiting = [] if using is None else pending(using=using, limit=1)
    return waiting[0].age_ms if waiting else None


def discard(message_id: int, *, using: str = "default") -> bool:
    """Delete a message that shall never be sent; later ones of its group go on. ``False`` if it is gone already."""
    label = rows.rows(using).filter(pk=message_id).values_list("task", "task_id").first()
    if label is None:
        return False
    logger.warning("idempotency: staged message %s[%s] is discarded", *label)
    return rows.delete(using, message_id)
