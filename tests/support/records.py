"""Records that tests put into a store."""

from __future__ import annotations

import os
from typing import Any

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    SettleRequest,
    Stored,
)
from celery_idempotent.stores import Store


def claim_key(store: Store, identity: Identity, **more: Any) -> Record:
    """Claim a key for somebody else."""
    about = {"lease_ms": 30_000, "keep_ms": 90_000, "task_id": "other", "worker": "elsewhere:1"}
    request = ClaimRequest(identity=identity, attempt=os.urandom(8), **{**about, **more})
    answer = store.claim(request)
    assert isinstance(answer, Claimed), answer
    return answer.record


def settle_key(store: Store, identity: Identity, state: Any, value: Stored | None = None) -> Record:
    """Claim a key for somebody else, and settle it; return the record as it was claimed."""
    record = claim_key(store, identity)
    assert store.settle(SettleRequest(record=record, state=state, value=value, keep_ms=90_000))
    return record
