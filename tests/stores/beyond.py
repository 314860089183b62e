"""What mutants of the stores showed beside the contract: bounds, and several attempts without an answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery_idempotent.records import Claimed, ClaimRequest, Identity, ReserveRequest

__all__ = ["any_attempt_gives_way", "doubles_ten_times"]

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


def any_attempt_gives_way(store: Any) -> None:
    """Claim a key anew whose claim is one of several that were never answered, and not the last of them."""
    asked: Any = {"identity": Identity(namespace="charge", key="no answer")}
    asked |= {"lease_ms": 60_000, "keep_ms": 60_000}
    first = store.claim(ClaimRequest(attempt=b"attempt1", **asked))
    unanswered = (b"attempt1", b"attempt2")
    again = store.claim(ClaimRequest(attempt=b"attempt3", unanswered=unanswered, **asked))
    assert isinstance(again, Claimed)
    assert again.record.token > first.record.token
    assert again.record.crashes == 0
