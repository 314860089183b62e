"""The kit for tests of idempotent tasks: isolated records, deliveries and killed workers."""

from __future__ import annotations

from celery_idempotent.testing.crashes import CrashReport, KilledAt, crash_matrix, lose_worker
from celery_idempotent.testing.delivery import (
    Delivery,
    Message,
    deliver,
    deliver_at_once,
    deliver_message,
    deliver_twice,
)
from celery_idempotent.testing.isolation import FakeClock, idempotency_off, isolated_records

__all__ = [
    "CrashReport",
    "Delivery",
    "FakeClock",
    "KilledAt",
    "Message",
    "crash_matrix",
    "deliver",
    "deliver_at_once",
    "deliver_message",
    "deliver_twice",
    "idempotency_off",
    "isolated_records",
    "lose_worker",
]
