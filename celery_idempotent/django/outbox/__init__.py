"""Calls that are published if their transaction commits, and only then; use it as ``celery_idempotent.django.outbox``.

Its functions are imported when they are asked for: the table of the outbox, in this package too, is one of the app's
models, which Django imports before anything that works with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_idempotent.django.outbox.interceptor import (
        Pending,
        Sent,
        discard,
        oldest_ms,
        pending,
        send,
        stage,
        sweep,
    )

__all__ = ["Pending", "Sent", "discard", "oldest_ms", "pending", "send", "stage", "sweep"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from celery_idempotent.django.outbox import interceptor

    return getattr(interceptor, name)
