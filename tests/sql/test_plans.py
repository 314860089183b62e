"""PostgreSQL plans the statements of almost every task once a connection, and not once a task."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("django")

from django.db import connections
from django.test.utils import CaptureQueriesContext

from celery_idempotent.django.sql import plans
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Settled,
    SettleRequest,
    State,
)

NAMES = "SELECT name FROM pg_prepared_statements WHERE name LIKE 'celery_idempotent_%'"


def claim(store: DjangoStore, key: str) -> Any:
    return store.claim(
        ClaimRequest(
            identity=Identity(namespace="charge", key=key),
            attempt=os.urandom(8),
            lease_ms=60_000,
            keep_ms=60_000,
        )
    )


def run(store: DjangoStore, key: str) -> None:
    record = claim(store, key).record
    assert store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
    )


@pytest.fixture
def store(use_database: Callable[..., str]) -> Iterator[DjangoStore]:
    """A store on a connection that was never used."""
    alias = use_database("postgresql")
    connections[alias].ensure_connection()
    store = DjangoStore(alias)
    yield store
    store.close()
    connections[alias].close()


def prepared(store: DjangoStore) -> list[str]:
    with connections[store.alias].cursor() as cursor:
        cursor.execute(NAMES)
        return sorted(name for (name,) in cursor.fetchall())


def asked(store: DjangoStore, work: Callable[[], object]) -> list[str]:
    """Return the first word of each statement that this takes."""
    with CaptureQueriesContext(connections[store.alias]) as context:
        work()
    return [query["sql"].split()[0] for query in context.captured_queries]


def test_a_connection_that_is_used_often_plans_each_statement_once(store):
    # One that closes after the task would prepare them for nothing.
    assert asked(store, lambda: run(store, "first")) == ["WITH", "WITH"]
    assert prepared(store) == []
    for n in range(3):
        run(store, f"{n}")
    assert asked(store, lambda: run(store, "planned")) == ["EXECUTE", "EXECUTE"]
    assert len(prepared(store)) == 2
    assert claim(store, "planned").record.state is State.COMPLETED


def test_a_duplicate_of_a_completed_key_takes_one_statement(store):
    for n in range(4):
        run(store, f"{n}")
    answers = []
    assert asked(store, lambda: answers.append(claim(store, "2"))) == ["EXECUTE"]
    assert isinstance(answers[0], Settled)


def test_a_duplicate_takes_one_statement_on_a_connection_that_was_just_opened_too(store):
    run(store, "once")
    assert asked(store, lambda: claim(store, "once")) == ["WITH"]


def run_atomic(store: DjangoStore, key: str, *, body: Callable[[], object] | None = None) -> None:
    record = claim(store, key).record
    with store.transaction(record) as transaction:
        if body is not None:
            body()
        transaction.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
        )


def test_an_atomic_run_takes_two_statements_beside_its_claim(store):
    """The lock goes with the look at the record, the look whether the task ended its transaction with the settle."""
    work = functools.partial(run_atomic, store, "atomic")
    assert asked(store, work) == ["WITH", "BEGIN", "SAVEPOINT", "RELEASE", "COMMIT"]
    assert isinstance(claim(store, "atomic"), Settled)


def test_the_settle_of_an_atomic_run_is_planned_once_a_connection(store):
    for n in range(3):
        run_atomic(store, f"{n}")
    known = prepared(store)
    with CaptureQueriesContext(connections[store.alias]) as context:
        for n in range(3, 6):
            run_atomic(store, f"{n}")
    settles = [query["sql"] for query in context.captured_queries if "RELEASE" in query["sql"]]
    assert [sql.count("EXECUTE") for sql in settles] == [1, 1, 1]
    assert prepared(store) == known
    assert len(known) == 2, "claim and settle"


def test_an_atomic_run_whose_session_does_not_know_its_settle_is_committed_all_the_same(store):
    """A pooler may give each transaction another session."""
    own = connections[store.alias]
    control = Session(own, store.lines.words(own), inside=False).control
    for n in range(4):
        run_atomic(store, f"{n}")
    control("CREATE TABLE planned_effects (key text)")

    def body() -> None:
        control("INSERT INTO planned_effects VALUES ('there')")
        control("DEALLOCATE ALL")

    rows = Session(own, store.lines.words(own), inside=False).rows
    try:
        record = claim(store, "undone").record
        with pytest.raises(ZeroDivisionError), store.transaction(record) as transaction:
            body()
            assert transaction.settle(
                SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
            )
            raise ZeroDivisionError
        assert rows("SELECT count(*) FROM planned_effects") == [(0,)], "one transaction for both"
        assert isinstance(claim(store, "undone"), Held)
        for n in range(5):
            run_atomic(store, f"after-{n}", body=body)
            assert isinstance(claim(store, f"after-{n}"), Settled)
        assert rows("SELECT count(*) FROM planned_effects") == [(5,)]
    finally:
        control("DROP TABLE planned_effects")


def test_a_plan_that_is_to_be_made_anew_may_be_gone_already(store, monkeypatch):
    """A pooler may give another session, and somebody may say DEALLOCATE ALL."""
    monkeypatch.setattr(plans, "_USES", 2)
    for n in range(4):
        run(store, f"{n}")
    own = connections[store.alias]
    uses = plans._of_connection[own.connection].uses
    assert 2 in uses.values(), "the next use is one too many"
    Session(own, store.lines.words(own), inside=False).control("DEALLOCATE ALL")
    for n in range(3):
        run(store, f"after-{n}")
        assert isinstance(claim(store, f"after-{n}"), Settled)


def test_a_text_of_a_class_of_its_own_is_taken(store):
    class Text(str):
        pass

    for n in range(4):
        run(store, f"{n}")
    run(store, Text("own"))
    assert isinstance(claim(store, "own"), Settled)


def test_a_session_that_does_not_know_its_statements_any_more_goes_without(store):
    for n in range(4):
        run(store, f"{n}")
    for n in range(5):
        with connections[store.alias].cursor() as cursor:
            cursor.execute("DEALLOCATE ALL")
        assert isinstance(claim(store, f"after-{n}"), Claimed)
    # Somebody takes them away, and is given no more.
    assert asked(store, lambda: run(store, "plain")) == ["WITH", "WITH"]


def test_a_statement_that_another_process_prepared_in_this_session_is_taken(store):
    """Both have the session of a pooler, in turn."""
    for n in range(4):
        run(store, f"{n}")
    plans._of_connection.clear()
    for n in range(4):
        run(store, f"other-{n}")
    assert asked(store, lambda: run(store, "planned")) == ["EXECUTE", "EXECUTE"]


def test_a_plan_is_made_anew_now_and_then(store, monkeypatch):
    """That of a table with ten rows may read all of it."""
    monkeypatch.setattr(plans, "_USES", 5)
    for n in range(4):
        run(store, f"{n}")
    words = asked(store, lambda: [run(store, f"more-{n}") for n in range(10)])
    assert words.count("DEALLOCATE") == 4
    assert words.count("PREPARE") == 4
    assert words.count("EXECUTE") == 20


def test_a_statement_whose_columns_changed_is_sent_as_it_is(store):
    own = connections[store.alias]
    session = Session(own, store.lines.words(own), inside=False)

    def ask() -> object:
        return plans.rows(session, "SELECT amount FROM changing WHERE amount::text <> %s", ("x",))

    session.control("CREATE TABLE changing AS SELECT 17 AS amount")
    try:
        for _ in range(6):
            assert ask() == [(17,)]
        session.control("ALTER TABLE changing ALTER COLUMN amount TYPE text")
        assert ask() == [("17",)]
    finally:
        session.control("DROP TABLE changing")


def test_nothing_is_prepared_within_a_transaction(store):
    """There an error would be the end of it."""
    for n in range(4):
        run(store, f"{n}")
    own = connections[store.alias]
    session = Session(own, store.lines.words(own), inside=False)
    with session.transaction():
        assert asked(store, lambda: plans.rows(session, "SELECT 1 WHERE %s", (True,))) == ["SELECT"]


def test_nothing_is_prepared_where_the_project_names_a_pooler(use_database):
    alias = use_database("postgresql", DISABLE_SERVER_SIDE_CURSORS=True)
    connections[alias].ensure_connection()
    store = DjangoStore(alias)
    for n in range(6):
        run(store, f"{n}")
    assert prepared(store) == []
    store.close()
