"""Django's own connection pool (``OPTIONS["pool"]``): the store's connections are none of it, in whatever process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.records import (
    State,
)
from tests.sql.verbs import KEY, VALUE, claimed, end_of, named, renewal

pytest.importorskip("psycopg_pool")
pytest.importorskip("django")

import django
from django.db import connections

from celery_idempotent.django.store import DjangoStore

pytestmark = pytest.mark.skipif(django.VERSION < (5, 1), reason="Django has no pool")

#: How many connections the pool of a process opens at once: more than the store ever keeps.
POOL = {"min_size": 6, "max_size": 6}


@pytest.fixture
def pooled(use_database: Callable[..., str]) -> Callable[..., str]:
    """A function that gives an alias with a pool of Django's."""

    def pooled(**pool: Any) -> str:
        return use_database("postgresql", CONN_MAX_AGE=0, options={"pool": pool})

    return pooled


def test_one_connection_in_the_pool_is_enough_for_an_atomic_run(pooled):
    """It belongs to the task: a renewal, a step and a second claim meanwhile do not wait for it."""
    store = DjangoStore(pooled(min_size=1, max_size=1, timeout=5))
    record = claimed(store)
    try:
        with store.transaction(record) as run:
            assert store.renew([renewal(record)]) == [True]
            assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE)
            claimed(store, named("order-18"))
            assert run.settle(end_of(record))
        assert store.get(KEY).state is State.COMPLETED
    finally:
        store.close()
        connections[store.alias].close_pool()


def test_a_verb_opens_no_pool(pooled):
    """A worker's main process asks the store when it buries a child, and forks the next one after that."""
    store = DjangoStore(pooled(**POOL))
    connections[store.alias].close()
    connections[store.alias].close_pool()
    try:
        assert store.get(KEY) is None
        assert store.alias not in connections[store.alias]._connection_pools
    finally:
        store.close()
