"""Calls that are published if their transaction commits, and only then; use it as ``celery_idempotent.django.outbox``.

Its functions are imported when they are asked for: models are made once the apps are.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery_idempotent.django.outbox.messages import Sent, oldest_ms, stage, sweep

__all__ = ["Sent", "oldest_ms", "stage", "sweep"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.messages"), name)
