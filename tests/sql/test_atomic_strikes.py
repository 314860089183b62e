"""A time limit that strikes around the end of a transaction: the database decides, and the next task finds it clean."""

from __future__ import annotations

import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest

pytest.importorskip("django")

from billiard.exceptions import SoftTimeLimitExceeded
from django.db import connections

from celery_idempotent.django.sql.atomic import ClaimTransaction
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.protocol.claim import current_run
from celery_idempotent.records import Identity, State
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.support.runs import Ran
from tests.unit.test_runner import a_call, make_runner

ROUNDS = 10


class Till:
    """Runs atomic tasks that write one row each."""

    def __init__(self, store: DjangoStore) -> None:
        self.store = store
        self.alias = store.alias
        self.other = connections.create_connection(self.alias)
        self.run = make_runner(store, atomic=True, lease_ms=20_000).execute

    def pay(self, key: str, error: Exception | None = None) -> object:
        """What the task ends with."""
        try:
            return self.run(a_call(identity=identity(key)), partial(self._body, key, error))
        except Exception as found:  # noqa: BLE001  whatever it is
            return found

    def _body(self, key: str, error: Exception | None) -> None:
        execute(self.alias, "INSERT INTO payments VALUES (%s)", (key,))
        if error is not None:
            raise error

    def agree(self, key: str) -> bool:
        """Was it paid, and does the record say so? As another process sees it."""
        record = self.store.get(identity(key))
        with self.other.cursor() as cursor:
            cursor.execute("SELECT count(*) FROM payments WHERE name = %s", (key,))
            ((paid,),) = cursor.fetchall()
        assert paid == (record is not None and record.state is State.COMPLETED), (key, record)
        return bool(paid)

    def rests(self) -> None:
        """The thread's connection is in no transaction."""
        own = connections[self.alias]
        assert not own.in_atomic_block
        assert own.connection is None or own.autocommit

    def clean(self, key: str) -> None:
        """It is in none, and the next task runs by it."""
        self.rests()
        for each in (f"{key} next", key):
            # What waits for a lock that was left behind ends with an error of the database's.
            ended = self.pay(each)
            assert not isinstance(ended, Exception), ended
            assert self.agree(each)


def identity(key: str) -> Identity:
    return Identity(namespace="shop.charge", key=key)


@pytest.fixture(params=databases.VENDORS)
def till(
    request: pytest.FixtureRequest,
    open_store: Callable[..., DjangoStore],
    make_table: Callable[..., None],
) -> Iterator[Till]:
    till = Till(open_store(request.param))
    make_table(till.alias, "payments", "name varchar(50)")
    yield till
    till.other.close()
    # No shield is here: an exception may have struck before the run took its claim back.
    current_run.set(None)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("where", "raised"),
    [
        ("_commit", None),
        ("_rollback", ValueError()),
        ("rollback", ValueError()),
        ("set_autocommit", None),
        ("set_autocommit", ValueError()),
        ("validate_no_atomic_block", None),
    ],
)
def test_one_in_the_statements_that_begin_and_end_it(
    till: Till, monkeypatch: pytest.MonkeyPatch, where: str, raised: Exception | None, when: str
):
    """Effect and record agree, also where Django would turn autocommit on, which commits on MySQL and SQLite."""
    kind = type(connections[till.alias])
    real = getattr(kind, where)
    assert till.pay("first") is not None  # connects
    struck: list[str] = []

    def strike(self: Any, *args: Any, **kwargs: Any) -> Any:
        if struck or self is not connections[till.alias]:
            return real(self, *args, **kwargs)
        struck.append(where)
        if when == "after":
            real(self, *args, **kwargs)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(kind, where, strike)
    till.pay("order", raised)
    monkeypatch.undo()
    assert struck
    till.agree("order")
    till.clean("order")


@pytest.mark.parametrize("till", ["mariadb"], indirect=True)
def test_one_while_the_session_gets_its_own_time_out_back(
    till: Till, monkeypatch: pytest.MonkeyPatch
):
    """What the server still sends must not be read as the answer to the next task's statement."""
    real = Session.execute

    def strike(session: Session, sql: str, params: Any = (), **first: str) -> int:
        if "release_lock" not in sql:
            return real(session, sql, params, **first)
        monkeypatch.undo()
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(Session, "execute", strike)
    till.pay("order")
    assert connections[till.alias].connection is None
    assert till.agree("order")
    till.clean("order")


@pytest.mark.parametrize("method", ["__enter__", "__exit__"])
def test_one_between_two_contexts(till: Till, monkeypatch: pytest.MonkeyPatch, method: str):
    """At the first instruction of an ``__exit__``, or the last of an ``__enter__``, nobody's ``try`` is there yet."""
    real = ClaimTransaction.__enter__

    def strike(run: ClaimTransaction, *_: object) -> None:
        if method == "__enter__":
            real(run)
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(ClaimTransaction, method, strike)
    error = till.pay("order")
    assert isinstance(error, SoftTimeLimitExceeded), "it is not committed, and not told so"
    assert not till.agree("order")
    monkeypatch.undo()
    till.clean("order")
    del error  # with the context in its traceback, which closes now
    till.clean("order")


# Struck in the end of some object, an exception is lost: Python says so.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("raised", [None, ValueError()], ids=["returns", "raises"])
def test_one_at_any_moment(till: Till, raised: Exception | None):
    """With a real signal, at random microseconds."""
    # So far: what was timed while the machine was busy would strike after the end.
    shortest = math.inf

    def pay_in_peace(key: str, raised: Exception | None = None) -> None:
        nonlocal shortest
        started = time.perf_counter()
        till.pay(key, raised)
        shortest = min(shortest, time.perf_counter() - started)

    for n in range(10):
        pay_in_peace(f"warm-up {n}", raised)

    def strike(*_: object) -> None:
        raise SoftTimeLimitExceeded

    def disarm() -> None:
        try:
            signal.setitimer(signal.ITIMER_REAL, 0)
        except SoftTimeLimitExceeded:  # at this very moment
            signal.setitimer(signal.ITIMER_REAL, 0)

    before = signal.signal(signal.SIGALRM, strike)
    struck = 0
    try:
        for n in range(ROUNDS):
            ended: object = None
            try:
                try:
                    signal.setitimer(signal.ITIMER_REAL, random.uniform(0.2, 1.4) * shortest)
                    ended = till.pay(f"order {n}", raised)
                    struck += isinstance(ended, SoftTimeLimitExceeded)
                finally:
                    disarm()
            except SoftTimeLimitExceeded:
                disarm()  # right here
            till.rests()
            pay_in_peace(f"next {n}")
            assert till.agree(f"next {n}")
            assert till.agree(f"order {n}") or not isinstance(ended, Ran)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert struck > 0, "the timer hardly ever struck inside a run"
    assert rows(till.alias, "SELECT 1") == [(1,)]
