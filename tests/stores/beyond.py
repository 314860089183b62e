"""What mutants of the stores showed beside the contract: bounds, and several attempts without an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_idempotent.records import Identity, ReserveRequest

__all__ = ["doubles_ten_times"]

FIRST_MS = 1_000


def doubles_ten_times(store: Any, advance: Callable[[float], None]) -> None:
    """Sweep a message that nobody sends; each sweep finds it after no more than 1,024 times the first deadline."""
    identity = Identity(namespace="charge", key="nobody sends it")
    reserved: Any = {"deadline_ms": FIRST_MS, "keep_ms": 86_400_000, "message": b"message"}
    store.reserve(ReserveRequest(identity=identity, task_id="first", **reserved))
    advance(FIRST_MS + 1)
    for times in range(13):
        (requeued,) = store.sweep(limit=10, requeue_ms=FIRST_MS).requeued
        assert requeued.identity == identity
        advance(FIRST_MS * 2 ** min(times, 10) + 1)
