"""The database's clock is read, and compared with this machine's."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

pytest.importorskip("django")

from celery_idempotent.django.store import DjangoStore
from tests.sql.verbs import KEY, claimed, end_of
from tests.support.waiting import wait_for


def test_in_a_transaction_time_goes_on(store: DjangoStore) -> None:
    """PostgreSQL's own now() is when the transaction began: a task may take hours."""
    record = claimed(store)
    with store.transaction(record) as run:
        begun = store.now_ms()
        wait_for(lambda: store.now_ms() > begun + 5)
        assert run.settle(end_of(record))
    settled = store.get(KEY)
    assert settled is not None
    assert settled.updated_ms > begun + 5


def test_the_time_zone_of_a_session_changes_nothing(use_database: Callable[..., str]) -> None:
    zone = "SET time_zone = '+05:00'"
    store = DjangoStore(use_database("mariadb", options={"init_command": zone}))
    assert abs(store.now_ms() - time.time_ns() // 1_000_000) < 3_600_000
    store.close()
