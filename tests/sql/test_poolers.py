"""Nothing that is kept in a session is relied on, so a pooler may give each transaction another one."""

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
from tests.sql.verbs import KEY, claim, claimed, end_of, frozen, named
from tests.stores.verbs import LIVES

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django.sql.connections import Connections, Session
from celery_idempotent.django.store import DjangoStore

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
