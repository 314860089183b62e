"""What tests of idempotent tasks need."""

from __future__ import annotations

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
    FakeClock,
    IsolatedRecords,
    idempotency_off,
    isolated_records,
)

__all__ = [
    "CrashReport",
    "Delivery",
    "FakeClock",
    "IsolatedRecords",
    "KilledAt",
    "Message",
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
