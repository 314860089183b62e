"""A cache before a database: no query for what is settled, and nothing cached that is not committed."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("django")

from django.db import connections, transaction

from celery_idempotent.django.hybrid import HybridStore
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.records import (
    Claimed,
    Held,
    Settled,
    State,
)
from celery_idempotent.stores import open_store
from tests.sql import databases
from tests.sql.verbs import KEY, VALUE, claim, end_of

pytestmark = pytest.mark.redis

FINGERPRINT = bytes(16)


@pytest.fixture(params=databases.KINDS)
def alias(request: pytest.FixtureRequest, use_database: Callable[..., str]) -> str:
    """Every kind of database in turn."""
    return use_database(request.param)


@pytest.fixture
def store(alias: str, redis_url: str, prefix: str) -> Iterator[Any]:
    store = open_store(f"hybrid+{redis_url}?truth={alias}&prefix={prefix}&socket_timeout=5")
    yield store
    store.close()


@pytest.fixture
def queries(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every statement of the store, on whatever connection."""
    said: list[str] = []
    execute = Session._execute

    def listen(self: Session, sql: str, *args: Any) -> Any:
        said.append(sql)
        return execute(self, sql, *args)

    monkeypatch.setattr(Session, "_execute", listen)
    return said


class Undone(Exception):
    pass


@contextmanager
def undone(context: Any) -> Iterator[Any]:
    """End a transaction with an exception."""
    try:
        with context as run:
            yield run
            raise Undone
    except Undone:
        pass


@contextmanager
def no_query(queries: list[str]) -> Iterator[None]:
    queries.clear()
    yield
    assert queries == []


def ask(store: Any) -> Any:
    """Ask for the key, each time for another task."""
    return claim(store, fingerprint=FINGERPRINT, task_id=str(uuid.uuid4()))


def test_the_message_that_a_failure_keeps_is_not_in_its_copy(store):
    ended = end_of(ask(store).record, state=State.FAILED, message=b"with its arguments")
    assert store.settle(ended)
    assert store.get(KEY).message == b"with its arguments"
    assert store.cache.look(KEY).record == replace(store.get(KEY), message=None)


def test_in_an_atomic_task_the_cache_learns_what_was_committed_and_not_before(store, queries):
    assert store.supports_transactions
    record = ask(store).record
    with store.transaction(record) as run:
        assert run.settle(end_of(run.record))
        assert store.cache.look(KEY) is None
    assert store.cache.look(KEY).record == store.get(KEY)
    with no_query(queries):
        assert ask(store).record.value == VALUE


def test_of_a_transaction_that_is_undone_nothing_is_cached(store):
    record = ask(store).record
    with undone(store.transaction(record)) as run:
        assert run.settle(end_of(run.record))
    assert store.cache.look(KEY) is None
    assert isinstance(ask(store), Held)
    assert store.release(KEY, token=record.token)
    assert isinstance(ask(store), Claimed)


def test_inside_a_transaction_of_the_caller_nothing_is_cached_that_it_may_undo(store, alias):
    """Only on SQLite does a verb become part of it."""
    sqlite = connections[alias].vendor == "sqlite"
    record = ask(store).record
    with undone(transaction.atomic(using=alias)):
        assert store.settle(end_of(record))
        assert isinstance(ask(store), Settled)
        assert (store.cache.look(KEY) is None) is sqlite
    answer = ask(store)
    assert isinstance(answer, Held if sqlite else Settled)


def test_a_forget_in_a_transaction_of_the_caller_is_safe_however_that_ends(store, alias):
    assert store.settle(end_of(ask(store).record))
    with undone(transaction.atomic(using=alias)):
        assert store.forget(KEY)
    assert isinstance(ask(store), Settled if connections[alias].vendor == "sqlite" else Claimed)
    with transaction.atomic(using=alias):
        store.forget(KEY)
    assert isinstance(ask(store), Claimed)


def test_what_is_not_committed_is_no_result_even_where_dirty_reads_are_allowed(
    use_database: Callable[..., str], redis_url: str, prefix: str
):
    alias = use_database("mariadb", options={"isolation_level": "read uncommitted"})
    store: Any = HybridStore(f"{redis_url}?prefix={prefix}&socket_timeout=5", alias)
    record = ask(store).record
    writer = connections.create_connection(alias)
    try:
        with writer.cursor() as cursor:
            cursor.execute("BEGIN")
            cursor.execute("UPDATE celery_idempotent_record SET state = 'C'")
            assert cursor.rowcount == 1
            # It can be seen by whoever wants to.
            ((state,),) = databases.rows(alias, "SELECT state FROM celery_idempotent_record")
            assert state == "C"
            assert isinstance(ask(store), Held)
            store.fill(KEY)
            assert store.cache.look(KEY) is None
            cursor.execute("ROLLBACK")
        assert store.get(KEY).token == record.token
    finally:
        writer.close()
        store.close()
