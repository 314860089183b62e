"""Nothing that is kept in a session is relied on, so a pooler may give each transaction another one."""

from __future__ import annotations

import contextlib
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import (
    Held,
    Record,
    Settled,
    State,
)
from tests.sql import databases
from tests.sql.databases import shift
from tests.sql.verbs import KEY, VALUE, claimed, end_of, renewal
from tests.sql.verbs import claim as ask
from tests.stores.verbs import reserve

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
    """Go through the life of a record, and see that each answer is what it should be."""

    claim = partial(ask, store)
    assert reserve(store, keep_ms=60_000).record.state is State.QUEUED
    first = claim(on_stale="requeue", message=b"message").record
    assert isinstance(claim(), Held)
    assert store.renew([renewal(first)]) == [True]
    assert store.checkpoint(KEY, token=first.token, name="pay", value=VALUE)
    assert store.interrupt(KEY, token=first.token) is not None
    assert store.requeue(KEY, deadline_ms=60_000) is not None
    shift(store, 60_001)
    assert len(store.sweep(limit=10).requeued) == 1
    assert store.release(KEY, token=claim().record.token)
    assert store.forget(KEY)
    assert store.release(KEY, token=claim().record.token)
    second = claim().record
    with store.transaction(second) as run:
        assert run.settle(end_of(second))
    assert isinstance(claim(), Settled)
    assert store.mark_delivered(KEY, token=second.token)
    shift(store, 60_001)
    assert store.settle(end_of(claimed(store), state=State.FAILED, keep_ms=1))
    shift(store, 3_660_000)
    assert store.prune(limit=10) == 1
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
        begun, go_on = threading.Event(), threading.Event()
        thread = threading.Thread(target=_freeze, args=(store, record, begun, go_on))
        thread.start()
        try:
            assert begun.wait(30)
            shift(store, 60_001)
            with pytest.raises(StoreUnavailable, match="query_wait_timeout"):
                ask(store)
        finally:
            go_on.set()
            thread.join()


def _freeze(
    store: DjangoStore, record: Record, begun: threading.Event, go_on: threading.Event
) -> None:
    with contextlib.suppress(Exception), store.transaction(record):
        begun.set()
        go_on.wait(60)
    connections[store.alias].close()
