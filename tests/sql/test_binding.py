"""Django's option ``server_side_binding`` is the project's own affair: our statements do without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Selection, Settled
from celery_idempotent.stores import Store
from tests.sql.databases import rows
from tests.sql.test_contract import SQLContract
from tests.sql.verbs import claim, end_of, named, renewal

#: The second has psycopg prepare even the first use of a statement.
OPTIONS = {"server_side_binding": True, "prepare_threshold": 0}


@pytest.fixture
def store(use_database: Callable[..., str]) -> Iterator[DjangoStore]:
    store = DjangoStore(use_database("postgresql", options=OPTIONS))
    yield store
    store.close()


@pytest.mark.parametrize("rounds", [1, 6])
def test_a_store_works_there_and_an_atomic_task_has_the_cursors_of_the_project(store, rounds):
    for n in range(rounds):
        record = claim(store, named(f"{n}")).record
        assert store.renew([renewal(record)]) == [True]
        with store.transaction(record) as run:
            with connections[store.alias].cursor() as cursor:
                assert not hasattr(cursor.cursor, "mogrify"), "it binds on the client"
                cursor.execute("SELECT %s::int", (n,))
            assert run.settle(end_of(record))
        assert isinstance(claim(store, named(f"{n}")), Settled)
    assert len(store.list(Selection(), limit=100).records) == rounds


def test_an_atomic_run_has_its_own_statements_prepared_and_not_those_of_the_task(use_database):
    """What is left of it on the connection is nothing that a pooler before other statements would mind."""
    store = DjangoStore(use_database("postgresql"))
    for n in range(2):
        record = claim(store, named(f"{n}")).record
        with store.transaction(record) as run:
            with connections[store.alias].cursor() as cursor:
                cursor.execute("SELECT %s::int", (n,))
            assert run.settle(end_of(record))
    raw = connections[store.alias].connection
    assert hasattr(raw.cursor(), "mogrify"), "it binds on the server"
    found = rows(store.alias, "SELECT statement FROM pg_prepared_statements ORDER BY prepare_time")
    assert [statement.split()[0] for (statement,) in found] == ["SELECT", "UPDATE"]
    store.close()


@pytest.mark.wide
class TestContract(SQLContract):
    @pytest.fixture
    def store(self, store: DjangoStore) -> Store:
        return store
