"""The verbs as these tests ask for them: with the usual times, about one key unless a test names another."""

from __future__ import annotations

import os
from typing import Any

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    Renewal,
    SettleRequest,
    State,
    Stored,
)

KEY = Identity(namespace="charge", key="order-17")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
TIMES: Any = {"lease_ms": 60_000, "keep_ms": 60_000}


def named(key: str) -> Identity:
    return Identity(namespace="charge", key=key)


def claim(store: Any, identity: Identity = KEY, **changes: Any) -> Any:
    """Ask for a key; return the answer."""
    asked = {"attempt": os.urandom(8), **TIMES, **changes}
    return store.claim(ClaimRequest(identity=identity, **asked))


def claimed(store: Any, identity: Identity = KEY, **changes: Any) -> Record:
    """Claim a key that is free; return its record."""
    answer = claim(store, identity, **changes)
    assert isinstance(answer, Claimed)
    return answer.record


def end_of(record: Record, **changes: Any) -> SettleRequest:
    """Return what completes a claim."""
    asked: Any = {"state": State.COMPLETED, "value": VALUE, "keep_ms": 60_000, **changes}
    return SettleRequest(record=record, **asked)


def renewal(record: Record, **changes: Any) -> Renewal:
    """Return what renews a claim."""
    return Renewal(identity=record.identity, token=record.token, **{**TIMES, **changes})
