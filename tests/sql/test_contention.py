"""Transactions that collide at their end: at the settle, or at the COMMIT, where no body could ask for a retry."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("django")

from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import DatabaseError, OperationalError, connections
from django.db.backends.signals import connection_created
from django.http import HttpResponse
from django.test import RequestFactory, override_settings

from celery_idempotent.django import IdempotentTask
from celery_idempotent.django.http import idempotent_view
from celery_idempotent.django.sql.atomic import ClaimTransaction
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Identity, SettleRequest, State
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.sql.verbs import found
from tests.support.runs import Ran, Replay, StoreFailed
from tests.support.waiting import wait_for
from tests.unit.test_runner import a_call, make_runner

KEY = Identity(namespace="shop.charge", key="order")

#: That of the guarded view.
view_app = Celery("contention_views", broker="memory://", set_as_current=False)


class Place:
    """One atomic run whose body reads and writes, and another session that comes in between."""

    def __init__(self, store: DjangoStore) -> None:
        self.store = store
        self.alias = store.alias
        settings = {**connections[store.alias].settings_dict}
        self.other = databases.add_alias("other_session", settings)
        self.runs = 0
        self.first: Callable[[], object] = lambda: None

    def run(self, body: Callable[[], Any], *, lease_ms: int = 20_000) -> Any:
        """What the run ends with; ``body`` is called after it has read, each time."""
        runner = make_runner(self.store, atomic=True, lease_ms=lease_ms)
        return runner.execute(a_call(identity=KEY), lambda: self.book_after(body))

    def book_after(self, body: Callable[[], Any]) -> int:
        """Count the run, read, and write; another transaction comes in between, at the first time."""
        self.runs += 1
        self.seats(self.alias)
        body()
        if self.runs == 1:
            self.first()
        return self.runs

    def seats(self, alias: str) -> int:
        return len(rows(alias, "SELECT name FROM seats"))

    def book(self, alias: str, name: str) -> None:
        execute(alias, "INSERT INTO seats VALUES (%s)", (name,))

    def in_between(self) -> None:
        """Another transaction reads what we write, and writes what we read."""
        with connections[self.other].cursor() as cursor:
            cursor.execute("BEGIN ISOLATION LEVEL SERIALIZABLE")
            self.seats(self.other)
            self.book(self.other, "theirs")
            cursor.execute("COMMIT")

    def names(self) -> list[str]:
        return sorted(name for (name,) in rows(self.other, "SELECT name FROM seats"))

    def completed(self) -> bool:
        record = self.store.get(KEY)
        return record is not None and record.state is State.COMPLETED


@pytest.fixture
def place(
    open_store: Callable[..., DjangoStore], make_table: Callable[..., None]
) -> Iterator[Callable[..., Place]]:
    made: list[Place] = []

    def make(vendor: str, level: str = "") -> Place:
        place = Place(open_store(vendor, level))
        make_table(place.alias, "seats", "name varchar(50)")
        execute(place.alias, "INSERT INTO seats VALUES ('first')")
        made.append(place)
        return place

    yield make
    for place in made:
        databases.drop_alias(place.other)


def swept(here: Place) -> None:
    """At REPEATABLE READ the settle cannot follow what was committed after its snapshot."""
    assert here.store.interrupt(KEY, token=found(here.store, KEY).token)


def lost(here: Place) -> None:
    databases.end_sessions(here.alias, own_only=True)


def idle(here: Place) -> None:
    """PostgreSQL says that its time limit is over in the next statement, which is that of the settle."""
    execute(here.alias, "SET idle_in_transaction_session_timeout = 50")
    time.sleep(0.5)  # the time limit is the server's


def lost_and_noticed(here: Place) -> None:
    lost(here)
    here.seats(here.alias)


@pytest.mark.parametrize(
    ("where", "when", "collides"),
    [
        ("postgresql serializable", "before the settle", Place.in_between),
        ("postgresql serializable", "before the commit", Place.in_between),
        ("postgresql repeatable read", "in the body", swept),
        ("postgresql", "in the body", idle),
        *((each, "in the body", lost) for each in ("postgresql", "mariadb")),
        *((each, "in the body", lost_and_noticed) for each in ("postgresql", "mariadb")),
    ],
)
def test_what_collides_runs_the_body_again(
    place: Callable[..., Place],
    monkeypatch: pytest.MonkeyPatch,
    where: str,
    when: str,
    collides: Callable[[Place], None],
):
    here = place(*where.split(" ", 1))
    real = ClaimTransaction.settle

    def at(moment: str) -> None:
        if here.runs == 1 and moment == when:
            collides(here)

    def settle(run: ClaimTransaction, request: SettleRequest) -> bool:
        at("before the settle")
        done = real(run, request)
        at("before the commit")
        return done

    here.first = lambda: at("in the body")
    monkeypatch.setattr(ClaimTransaction, "settle", settle)
    assert here.run(lambda: here.book(here.alias, "ours")) == Ran(2)
    theirs = ["theirs"] * (collides is Place.in_between)
    assert here.names() == ["first", "ours", *theirs]
    assert here.completed()


def atomic_task(store: DjangoStore, body: Callable[..., Any], **options: Any) -> Any:
    app = Celery("contention", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = store
    ours: Any = {"base": IdempotentTask, "shared": False, "idempotency_atomic": True}
    return app.task(name="book", **ours, **options)(body)


def test_a_task_that_runs_again_has_its_arguments_as_they_were(place: Callable[..., Place]):
    here = place("postgresql", "serializable")
    here.first = here.in_between

    def book(names: list[str], *, prices: dict[str, int]) -> int:
        def book_all() -> None:
            while names:
                name = names.pop()
                here.book(here.alias, f"{name} {prices.pop(name)}")

        return here.book_after(book_all)

    task = atomic_task(here.store, book)
    assert task.apply((["ann", "bob"],), {"prices": {"ann": 1, "bob": 2}}).get() == 2
    assert here.names() == ["ann 1", "bob 2", "first", "theirs"]


def test_a_task_runs_again_with_arguments_that_have_no_copy(place: Callable[..., Place]):
    here = place("postgresql", "serializable")
    here.first = here.in_between

    def book(lock: threading.Lock) -> int:
        with lock:
            return here.book_after(lambda: here.book(here.alias, "ours"))

    assert atomic_task(here.store, book).apply((threading.Lock(),)).get() == 2


def test_a_view_does_not_run_again_with_a_request_that_it_has_read(place: Callable[..., Place]):
    """Files are read to their end, and whatever hangs on the request was changed: its client sends another."""
    here = place("postgresql", "serializable")
    here.first = here.in_between

    class User:
        credits = 10

    @idempotent_view(scope=lambda _: "ann", atomic=True)
    def buy(request: Any) -> HttpResponse:
        def book() -> None:
            request.user.credits -= 5
            order = request.FILES["order"].read().decode()
            here.book(here.alias, f"{order} {request.user.credits}")

        here.book_after(book)
        return HttpResponse("bought")

    def ask() -> HttpResponse:
        order = {"order": SimpleUploadedFile("order", b"seat")}
        request: Any = RequestFactory().post("/", order, HTTP_IDEMPOTENCY_KEY="order-17")
        request.user = User()
        with override_settings(CELERY_IDEMPOTENT_APP=view_app):
            answer: HttpResponse = buy(request)
        return answer

    view_app.conf.idempotency_store = here.store
    first = ask()
    assert (first.status_code, first["Retry-After"]) == (503, "1")
    assert json.loads(first.content)["code"] == "rolled_back"
    assert json.loads(first.content)["detail"].startswith("The database rolled it back")
    assert here.names() == ["first", "theirs"]
    assert ask().content == b"bought"
    assert here.names() == ["first", "seat 5", "theirs"]
    assert ask()["Idempotent-Replayed"] == "true"
    assert here.runs == 2


@pytest.mark.parametrize("vendor", ["postgresql", "mariadb"])
def test_a_deadlock_at_the_settle_runs_the_body_again(place: Callable[..., Place], vendor: str):
    """Somebody holds the record and wants a row of ours; the settle wants the record."""
    here = place(vendor)
    other = connections.create_connection(here.alias)
    other.inc_thread_sharing()

    def theirs() -> None:
        with other.cursor() as cursor:
            cursor.execute("UPDATE seats SET name = 'theirs' WHERE name = 'first'")
            cursor.execute("COMMIT")

    threads: list[threading.Thread] = []

    def body() -> None:
        execute(here.alias, "UPDATE seats SET name = 'ours' WHERE name = 'first'")
        if here.runs > 1:
            return
        with other.cursor() as cursor:
            cursor.execute("BEGIN")
            if vendor == "postgresql":
                # Whose is over first is undone.
                cursor.execute("SET LOCAL deadlock_timeout = '10s'")
            # Has more to undo than we have: so it is ours that is undone.
            for n in range(50):
                cursor.execute("INSERT INTO seats VALUES (%s)", (f"many {n}",))
            cursor.execute("UPDATE celery_idempotent_record SET version = version + 1")
        threads.append(threading.Thread(target=theirs))
        threads[0].start()
        wait_for(lambda: databases.waits(here.other), 20, "the other to wait", interval=0.15)

    try:
        assert here.run(body) == Ran(2)
    finally:
        threads[0].join()
        other.close()
    assert "theirs" in here.names()
    assert here.completed()


def test_on_sqlite_a_reader_that_keeps_the_commit_waiting_too_long_runs_the_body_again(
    use_database: Callable[..., str],
    sql_databases: Callable[[str], dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """In the journal that SQLite has by default; the test project sets another."""
    monkeypatch.setattr(connection_created, "receivers", [])
    with (
        closing(sqlite3.connect(sql_databases("sqlite")["NAME"])) as tables,
        closing(sqlite3.connect(tmp_path / "own.sqlite3")) as own,
    ):
        tables.backup(own)
        own.execute("PRAGMA journal_mode = DELETE")
        own.execute("CREATE TABLE seats (name varchar(50))")
    alias = use_database("sqlite", NAME=str(tmp_path / "own.sqlite3"), options={"timeout": 0})
    here = Place(DjangoStore(alias))

    def read() -> None:
        execute(here.other, "BEGIN")
        here.seats(here.other)

    def committed(run: ClaimTransaction) -> bool:
        execute(here.other, "COMMIT")
        return real(run)

    real = ClaimTransaction.committed
    here.first = read
    monkeypatch.setattr(ClaimTransaction, "committed", committed)
    assert here.run(lambda: here.book(here.alias, "ours")) == Ran(2)
    assert here.names() == ["ours"]
    assert here.completed()
    databases.drop_alias(here.other)
    here.store.close()


def test_a_constraint_that_fails_at_the_commit_does_not(place: Callable[..., Place]):
    """The same body would meet it again."""
    here = place("postgresql")
    execute(here.alias, "ALTER TABLE seats ADD UNIQUE (name) DEFERRABLE INITIALLY DEFERRED")
    with pytest.raises(DatabaseError, match="duplicate key"):
        here.run(lambda: here.book(here.alias, "first"))
    assert here.runs == 1
    assert here.names() == ["first"]
    assert here.store.get(KEY) is None


def test_what_collides_to_the_end_fails_the_task_after_three_repeats(place: Callable[..., Place]):
    """Celery's ``autoretry_for`` sees the errors of the body alone."""
    here = place("postgresql", "serializable")
    here.first = here.in_between

    def book(name: str) -> None:
        here.book_after(lambda: here.book(here.alias, name))
        if here.runs > 1:
            here.in_between()

    options: Any = {"idempotency_key": "name", "autoretry_for": (OperationalError,)}
    task = atomic_task(here.store, book, **options)
    ended = deliver_message(task, message_of(task, ("ann",), {}))
    assert (ended.state, here.runs) == ("FAILURE", 4)
    assert not ended.published
    assert here.store.get(Identity(namespace="book", key="ann")) is None
    assert "ann" not in here.names()


def test_a_message_that_was_rolled_back_comes_back_as_it_was(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
):
    """Whatever the body did to its arguments: the next run gets those of the caller."""
    here = place("sqlite")
    seen: list[list[str]] = []

    def book(names: list[str]) -> None:
        seen.append(list(names))
        here.book(here.alias, names.pop())

    def away(*_: object) -> bool:
        raise StoreUnavailable("the row is locked")

    task = atomic_task(here.store, book)
    with monkeypatch.context() as patch:
        patch.setattr(ClaimTransaction, "settle", away)
        (again,) = deliver_message(task, message_of(task, (["ann"],), {})).published
    assert here.names() == ["first"]
    assert deliver_message(task, again).state == "SUCCESS"
    assert (seen, here.names()) == ([["ann"]] * 2, ["ann", "first"])


def test_a_commit_that_nobody_knows_about_sends_the_message_back(
    place: Callable[..., Place], monkeypatch: pytest.MonkeyPatch
):
    here = place("sqlite")
    own: Any = connections[here.alias]
    commit = own.commit

    def lost() -> None:
        commit()
        raise OperationalError("gone")

    def away(*_: object) -> bool:
        raise StoreUnavailable("gone")

    def book() -> None:
        here.book(here.alias, "ours")

    with monkeypatch.context() as patch:
        patch.setattr(own, "commit", lost)
        patch.setattr(ClaimTransaction, "committed", away)
        assert isinstance(here.run(book, lease_ms=300), StoreFailed)
    # The message comes back, and the record answers.
    assert isinstance(here.run(book), Replay)
    assert here.names() == ["first", "ours"]
