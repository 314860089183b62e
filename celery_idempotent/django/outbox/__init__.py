"""Calls that are published if their transaction commits, and only then; use it as ``celery_idempotent.django.outbox``.

Its functions are imported when they are asked for: the table of the outbox, in this package too, is one of the app's
models, which Django imports before anything that works with them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_idempotent.django.outbox.rows import of_scopes, oldest_ms
    from celery_idempotent.django.outbox.sending import Sent, sweep
    from celery_idempotent.django.outbox.staging import stage

__all__ = ["Sent", "of_scopes", "oldest_ms", "stage", "sweep"]


#: The module of each.
_HOMES = {
    "Sent": "sending",
    "of_scopes": "rows",
    "oldest_ms": "rows",
    "stage": "staging",
    "sweep": "sending",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
