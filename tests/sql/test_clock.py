"""The database's clock is read, and compared with this machine's."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("django")

from celery_idempotent.checks import check_store
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Claimed, ClaimRequest, Identity, SettleRequest, State
from celery_idempotent.stores import base
from celery_idempotent.stores.hybrid.store import HybridStore
from tests.support.admin import make_app
from tests.support.waiting import wait_for


def test_a_machine_whose_clock_is_off_is_told(
    store: DjangoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    app = make_app(store)
    assert check_store(app) == []
    behind = SimpleNamespace(time_ns=lambda: time.time_ns() - 90 * 10**9)
    monkeypatch.setattr(base, "time", behind)
    (found,) = check_store(app)
    assert found.id == "W018"
    assert "90 s ahead of this machine's" in found.problem


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


def test_behind_a_cache_the_truth_is_asked(
    store: DjangoStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_idempotent.stores.opening import hybrid

    cache, _ = hybrid("hybrid+redis://127.0.0.1:1/0?truth=default")
    both = HybridStore(cache, store)
    assert check_store(make_app(both)) == []
    behind = SimpleNamespace(time_ns=lambda: time.time_ns() - 90 * 10**9)
    monkeypatch.setattr(base, "time", behind)
    assert [each.id for each in check_store(make_app(both))] == ["W018"]
