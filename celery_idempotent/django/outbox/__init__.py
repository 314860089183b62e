"""Calls that are published if their transaction commits, and only then; use it as ``celery_idempotent.django.outbox``.

Its functions are imported when they are asked for: the table of the outbox, in this package too, is one of the app's
models, which Django imports before anything that works with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_idempotent.django.outbox.sending import Sent, send, sweep
    from celery_idempotent.django.outbox.staging import stage
    from celery_idempotent.django.outbox.waiting import Pending, discard, oldest_ms, pending

__all__ = ["Pending", "Sent", "discard", "oldest_ms", "pending", "send", "stage", "sweep"]


#: The module of each.
_HOMES = {
    "Pending": "waiting",
    "Sent": "sending",
    "discard": "waiting",
    "oldest_ms": "waiting",
    "pending": "waiting",
    "send": "sending",
    "stage": "staging",
    "sweep": "sending",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
