"""The database's clock is read, and compared with this machine's."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

pytest.importorskip("django")

from celery_idempotent.checks import check_store
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.stores import base
from celery_idempotent.stores.hybrid.store import HybridStore
from tests.support.admin import make_app


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
