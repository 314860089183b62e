"""What tests of idempotent tasks and of stores need; the contract of stores uses pytest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_idempotent.testing.clock import FakeClock
from celery_idempotent.testing.crashes import CrashReport, KilledAt, crash_matrix, lose_worker
from celery_idempotent.testing.delivery import (
    Delivery,
    Message,
    assert_ran_once,
    deliver,
    deliver_at_once,
    deliver_message,
    deliver_twice,
)
from celery_idempotent.testing.isolation import (
    IsolatedRecords,
    idempotency_off,
    isolated_records,
)

if TYPE_CHECKING:
    from celery_idempotent.testing.contract import StoreContract

__all__ = [
    "CrashReport",
    "Delivery",
    "FakeClock",
    "IsolatedRecords",
    "KilledAt",
    "Message",
    "StoreContract",
    "assert_ran_once",
    "crash_matrix",
    "deliver",
    "deliver_at_once",
    "deliver_message",
    "deliver_twice",
    "idempotency_off",
    "isolated_records",
    "lose_worker",
]


def __getattr__(name: str) -> object:
    # Not before it is asked for: an application's tests may do without pytest.
    if name != "StoreContract":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    # Before the import, so that a failing contract shows what it compared.
    pytest.register_assert_rewrite("celery_idempotent.testing.contract")
    from celery_idempotent.testing.contract import StoreContract

    return StoreContract
