"""The verbs of a store in few words: of one key, with a lease of a minute, for a record that is kept for two more."""

from __future__ import annotations

import os
from typing import Any

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    Renewal,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)

KEY = Identity(namespace="charge", key="order-17")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
LEASE_MS, KEEP_MS = 60_000, 120_000


def ask(store: Any, identity: Identity = KEY, **changes: Any) -> Any:
    """Claim; return whatever is answered."""
    asked = {"attempt": os.urandom(8), "lease_ms": LEASE_MS, "keep_ms": KEEP_MS, **changes}
    return store.claim(ClaimRequest(identity=identity, **asked))


def claim(store: Any, identity: Identity = KEY, **changes: Any) -> Record:
    """Claim, and get the key."""
    answer = ask(store, identity, **changes)
    assert isinstance(answer, Claimed)
    return answer.record


def reserve(store: Any, identity: Identity = KEY, **changes: Any) -> Any:
    """Reserve; return whatever is answered."""
    asked = {"task_id": "id", "deadline_ms": LEASE_MS, "keep_ms": KEEP_MS, **changes}
    return store.reserve(ReserveRequest(identity=identity, **asked))


def renew(store: Any, *records: Record, lease_ms: int = LEASE_MS) -> Any:
    """Renew these claims together; return whether each was."""
    return store.renew(
        [
            Renewal(identity=each.identity, token=each.token, lease_ms=lease_ms, keep_ms=KEEP_MS)
            for each in records
        ]
    )


def settle(store: Any, record: Record, state: Any = State.COMPLETED, **changes: Any) -> Any:
    """Settle; return whether it was accepted."""
    asked = {"value": VALUE, "keep_ms": KEEP_MS, **changes}
    return store.settle(SettleRequest(record=record, state=state, **asked))
