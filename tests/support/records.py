"""Records that tests put into a store."""

from __future__ import annotations

import os
from typing import Any

from celery_idempotent.records import Claimed, ClaimRequest, Identity, Record
from celery_idempotent.stores import Store


def claim_key(store: Store, identity: Identity, **more: Any) -> Record:
    """Claim a key for somebody else."""
    about = {"lease_ms": 30_000, "keep_ms": 90_000, "task_id": "other", "worker": "elsewhere:1"}
    request = ClaimRequest(identity=identity, attempt=os.urandom(8), **{**about, **more})
    answer = store.claim(request)
    assert isinstance(answer, Claimed)
    return answer.record
