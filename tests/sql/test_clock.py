"""The database's clock is read, and compared with this machine's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("django")

from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Claimed, ClaimRequest, Identity, SettleRequest, State
from tests.support.waiting import wait_for


def test_in_a_transaction_time_goes_on(store: DjangoStore) -> None:
    """PostgreSQL's own now() is when the transaction began: a task may take hours."""
    key = Identity(namespace="charge", key="order")
    asked: dict[str, Any] = {"attempt": os.urandom(8), "lease_ms": 60_000, "keep_ms": 60_000}
    claimed = store.claim(ClaimRequest(identity=key, **asked))
    assert isinstance(claimed, Claimed)
    with store.transaction(claimed.record) as run:
        begun = store.now_ms()
        wait_for(lambda: store.now_ms() > begun + 5)
        end = SettleRequest(
            record=claimed.record, state=State.COMPLETED, value=None, keep_ms=60_000
        )
        assert run.settle(end)
    settled = store.get(key)
    assert settled is not None
    assert settled.updated_ms > begun + 5


def test_the_time_zone_of_a_session_changes_nothing(use_database: Callable[..., str]) -> None:
    zone = "SET time_zone = '+05:00'"
    store = DjangoStore(use_database("mariadb", options={"init_command": zone}))
    assert abs(store.now_ms() - time.time_ns() // 1_000_000) < 3_600_000
    store.close()
