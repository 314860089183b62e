"""Sessions that a pooler, Django or psycopg lends, prepares or binds on: nothing that is kept in one is relied on."""

from __future__ import annotations

import contextlib
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import State
from tests.sql import databases
from tests.sql.databases import shift
from tests.sql.verbs import KEY, VALUE, claim, claimed, end_of, frozen, named, renewal
from tests.stores.verbs import LIVES

pytest.importorskip("django")

import django
from django.db import connections

from celery_idempotent.django.sql.connections import Connections, Session
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Selection, Settled
from celery_idempotent.stores import Store
from tests.sql.databases import rows
from tests.sql.test_contract import SQLContract

#: What outlives its transaction, on PostgreSQL.
SESSION_STATE = re.compile(
    r"^\s*SET\s+(?!LOCAL)|\bPREPARE\b|\bLISTEN\b|\bWITH HOLD\b|\bTEMP|\bpg_advisory_lock\b"
    r"|\bDISCARD\b|set_config\([^)]*false\)",
    re.IGNORECASE,
)


def use_every_verb(store: DjangoStore) -> None:
    """Let all become of a key that can, and of one in a transaction; then prune."""
    for life, live in LIVES.items():
        if life != "pruned":  # by SQL an hour later
            live(store, named(life))
            store.forget(named(life))
    record = claimed(store)
    with store.transaction(record) as run:
        assert run.settle(end_of(record))
    shift(store, 60_001)
    assert store.settle(end_of(claimed(store), state=State.FAILED, keep_ms=1))
    shift(store, 3_660_000)
    assert store.prune(limit=100) >= 1
    assert store.get(KEY) is None


class Rotating(Session):
    """Another session for each statement that is no part of a transaction, as a pooler may give."""

    sessions: Iterator[Any]
    seen: list[str]

    def _execute(self, sql: str, *args: Any) -> Any:
        self.seen.append(sql)
        self.connection = next(self.sessions)
        return super()._execute(sql, *args)


def test_every_statement_may_meet_another_session(
    open_store: Callable[..., DjangoStore], monkeypatch: pytest.MonkeyPatch
):
    store = open_store("postgresql")
    opened = [connections.create_connection(store.alias) for _ in range(3)]
    seen: list[str] = []
    members = {"sessions": itertools.cycle(opened), "seen": seen}
    rotating = type("Rotating", (Rotating,), members)
    dialect = store.connections.session_of(opened[0]).dialect

    @contextlib.contextmanager
    def session(self: Connections, own: Any) -> Iterator[Session]:
        yield rotating(opened[0], dialect)

    monkeypatch.setattr(Connections, "_session", session)
    use_every_verb(store)
    assert len(seen) > 25
    assert [sql for sql in seen if SESSION_STATE.search(sql)] == []
    for connection in opened:
        with connection.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM pg_prepared_statements")
            assert cursor.fetchone() == (0,)
        connection.close()
    connections[store.alias].close()


@pytest.fixture
def open_pooled(
    use_database: Callable[..., str], open_pooler: Callable[..., dict[str, str]]
) -> Iterator[Callable[..., DjangoStore]]:
    """A function that gives a store behind a PgBouncer in transaction mode."""
    opened: list[DjangoStore] = []

    def open_(**options: Any) -> DjangoStore:
        direct = use_database("postgresql", "direct")
        settings = {**connections.databases[direct], **open_pooler(direct, **options)}
        store = DjangoStore(databases.add_alias("pooled", settings))
        opened.append(store)
        return store

    yield open_
    for store in opened:
        store.close()
        databases.drop_alias(store.alias)


class TestPgBouncer:
    """In transaction mode: two sessions of the server for whoever comes."""

    def test_every_verb(self, open_pooled):
        store = open_pooled(default_pool_size=2)
        for _ in range(2):
            use_every_verb(store)
        assert store.connections.prepares is False

    def test_frozen_runs_that_hold_all_sessions_keep_the_claim_out_that_would_end_them(
        self, open_pooled
    ):
        """What the documentation says of small pools."""
        store = open_pooled(default_pool_size=1, query_wait_timeout=1)
        record = claimed(store)
        with frozen(store, record, settles=False):
            shift(store, 60_001)
            with pytest.raises(StoreUnavailable, match="query_wait_timeout"):
                claim(store)


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


#: How many connections the pool of a process opens at once: more than the store ever keeps.
POOL = {"min_size": 6, "max_size": 6}


@pytest.fixture
def pooled(use_database: Callable[..., str]) -> Callable[..., str]:
    """A function that gives an alias with a pool of Django's own: the store's connections are none of it."""
    pytest.importorskip("psycopg_pool")
    if django.VERSION < (5, 1):
        pytest.skip("Django has no pool")

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
