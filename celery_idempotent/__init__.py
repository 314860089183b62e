"""Celery tasks that take effect once: one logical operation runs once, and each duplicate gets the stored result."""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

from celery_idempotent.errors import (
    DuplicateCall,
    FailedByOperator,
    FingerprintMismatch,
    IdempotencyError,
    InProgress,
    InvalidKey,
    InvalidOption,
    KeyMissing,
    LeaseLost,
    ProcessingTimedOut,
    ResultUnavailable,
    StoreMisconfigured,
    StoreUnavailable,
    TooManyCrashes,
)
from celery_idempotent.keys.arguments import ALL_ARGUMENTS
from celery_idempotent.protocol.claim import Claim, current_claim
from celery_idempotent.records import EarlierCall, Record, State
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery_idempotent.celery.task import IdempotentTask

__all__ = [
    "ALL_ARGUMENTS",
    "Claim",
    "DuplicateCall",
    "EarlierCall",
    "FailedByOperator",
    "FingerprintMismatch",
    "IdempotencyError",
    "IdempotentTask",
    "InProgress",
    "InvalidKey",
    "InvalidOption",
    "KeyMissing",
    "LeaseLost",
    "ProcessingTimedOut",
    "Record",
    "ResultUnavailable",
    "State",
    "Store",
    "StoreMisconfigured",
    "StoreUnavailable",
    "TooManyCrashes",
    "current_claim",
    "get_store",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    """Import ``IdempotentTask`` once it is asked for; in a Django project it has ``delay_on_commit``."""
    if name != "IdempotentTask":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = import_module("celery_idempotent.celery.task").IdempotentTask
    if os.environ.get("DJANGO_SETTINGS_MODULE"):
        with suppress(ImportError):
            found = import_module("celery_idempotent.django").IdempotentTask
    globals()[name] = found
    return found
