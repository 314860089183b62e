"""A task's own transaction settles its record: both or neither, whatever happens on the way."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import (
    IdempotencyError,
    LeaseLost,
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.records import Claimed, Held, State
from tests.sql import databases
from tests.sql.databases import execute, rows, shift
from tests.sql.verbs import KEY, VALUE, claim, claimed, end_of, found, frozen, named
from tests.support.threads import in_background
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.db import DatabaseError, close_old_connections, connections, transaction

from celery_idempotent.django.sql.atomic import ClaimTransaction
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import POSTGRESQL_LOCK
from celery_idempotent.django.store import DjangoStore

SERVERS = ("postgresql", "mariadb")
LEVELS = ("read committed", "repeatable read", "serializable")
#: The error of a task that ended or broke its transaction says so.
ENDED = "ended or failed before the task did"


def on(*where: str) -> pytest.MarkDecorator:
    """Name the databases, each with an isolation level or without one, that ``store`` is in."""
    return pytest.mark.parametrize("store", where, indirect=True)


@pytest.fixture(params=databases.VENDORS)
def store(
    request: pytest.FixtureRequest,
    open_store: Callable[..., DjangoStore],
    make_table: Callable[..., None],
) -> DjangoStore:
    """A store with a table ``effects`` beside it, of one row, ``n`` = 0."""
    vendor, _, level = request.param.partition(" ")
    store = open_store(vendor, level)
    make_table(store.alias, "effects", "n integer")
    execute(store.alias, "INSERT INTO effects VALUES (0)")
    return store


def settle(run: Any, **changes: Any) -> bool:
    done: bool = run.settle(end_of(run.record, **changes))
    return done


def effects(store: DjangoStore) -> int:
    ((n,),) = rows(store.alias, "SELECT n FROM effects")
    return int(n)


def act(store: DjangoStore) -> None:
    execute(store.alias, "UPDATE effects SET n = n + 1")


def acts(store: DjangoStore, record: Any) -> None:
    """Run a task of this claim, whole."""
    with store.transaction(record) as run:
        act(store)
        assert settle(run)


@on(*(f"{vendor} {level}" for vendor in SERVERS for level in LEVELS), "sqlite")
def test_writes_and_record_are_committed_or_rolled_back_together(store: DjangoStore):
    record = claimed(store)
    with pytest.raises(ZeroDivisionError), store.transaction(record) as run:
        act(store)
        assert settle(run)
        raise ZeroDivisionError
    left = found(store)
    assert (effects(store), left.state, left.token) == (0, State.PROCESSING, record.token)
    with store.transaction(record) as run:
        act(store)
        assert settle(run, replaced=True)
    left = found(store)
    assert (effects(store), left.state, left.value) == (1, State.COMPLETED, VALUE)
    assert left.replaced
    assert left.updated_ms >= record.updated_ms


@on("postgresql")
def test_a_step_cannot_write_what_a_rollback_would_take_back(store: DjangoStore):
    """Its record outlives the rollback, and it would never run again. MariaDB has nothing that would refuse it."""
    app = Celery("stepping", set_as_current=False, broker="memory://", backend="cache+memory://")
    app.conf.idempotency_store = store
    runs: list[str] = []
    looked: list[Any] = []

    @app.task(
        base=IdempotentTask, shared=False, bind=True, idempotency_key="key", idempotency_atomic=True
    )
    def task(self: Any, key: str) -> None:
        def look() -> int:
            with transaction.atomic(using=store.alias):
                looked.append(rows(store.alias, "/* how many */ SELECT n FROM effects"))
            return 17

        runs.append(key)
        for write in (
            "UPDATE effects SET n = n + 1",
            "-- a comment\n insert into effects values (1)",
            "WITH gone AS (SELECT 1) DELETE FROM effects",
        ):
            with pytest.raises(IdempotencyError, match="may not write"):
                self.idempotency.step("debit", execute, store.alias, write)
        assert self.idempotency.step("look", look) == 17
        act(store)
        if len(runs) == 1:
            raise ZeroDivisionError

    assert [task.apply(("k",)).state for _ in range(2)] == ["FAILURE", "SUCCESS"]
    assert effects(store) == 1
    assert len(looked) == 1


@on(*SERVERS)
def test_a_claim_that_was_lost_meanwhile_is_not_settled(store: DjangoStore):
    record = claimed(store)
    with pytest.raises(LeaseLost), store.transaction(record) as run:
        act(store)
        assert store.forget(KEY)
        newer = claimed(store)
        if not settle(run):
            raise LeaseLost
    assert effects(store) == 0
    left = found(store)
    assert (left.state, left.token) == (State.PROCESSING, newer.token)


@on("mariadb")
def test_an_atomic_run_on_mariadb_has_eight_statements(
    store: DjangoStore, monkeypatch: pytest.MonkeyPatch
):
    """Of all kinds, in whatever session: docs/exactly-once.md gives their number."""
    driver: Any = pytest.importorskip("pymysql.connections")
    sent = list[Any]()
    send = driver.Connection._execute_command

    def note(connection: Any, command: int, sql: Any) -> None:
        sent.append(sql)
        send(connection, command, sql)

    monkeypatch.setattr(driver.Connection, "_execute_command", note)
    for name in ("with what a connection needs", "as usual"):
        sent.clear()
        with store.transaction(claimed(store, named(name))) as run:
            assert settle(run)
    assert len(sent) == 8, sent


def test_a_claim_that_was_lost_before_does_not_begin(store: DjangoStore):
    record = claimed(store)
    shift(store, 60_001)
    newer = claimed(store)
    with pytest.raises(LeaseLost), store.transaction(record):
        act(store)
    assert effects(store) == 0
    acts(store, newer)


@on(*SERVERS)
def test_nothing_of_the_record_is_locked_while_the_task_runs(store: DjangoStore):
    record = claimed(store)
    with store.transaction(record) as run:
        act(store)
        assert isinstance(claim(store), Held)
        assert store.get(KEY) is not None
        assert store.interrupt(KEY, token=record.token) is not None
        # A late settle with the record's own token is accepted.
        assert settle(run)
    left = found(store)
    assert (left.state, left.crashes) == (State.COMPLETED, 1)


@pytest.mark.parametrize(
    ("store", "statement"),
    [
        *((vendor, end) for vendor in databases.VENDORS for end in ("COMMIT", "ROLLBACK")),
        ("mariadb", "CREATE TABLE IF NOT EXISTS implicit (n integer)"),  # commits by itself
        # PostgreSQL takes nothing more in such a transaction; Django does not know of it.
        ("postgresql", "SELECT * FROM no_such_table"),
    ],
    indirect=["store"],
)
def test_a_task_that_ends_its_transaction_by_a_statement_is_told(
    store: DjangoStore, statement: str
):
    record = claimed(store)
    with pytest.raises(StoreMisconfigured, match=ENDED), store.transaction(record) as run:
        act(store)
        with suppress(DatabaseError):
            execute(store.alias, statement)
        settle(run)
    execute(store.alias, "DROP TABLE IF EXISTS implicit")
    assert found(store).state is State.PROCESSING


@on("postgresql")
@pytest.mark.parametrize(
    ("statement", "problem"),
    [("SET TRANSACTION READ ONLY", "is read-only"), ("SET LOCAL ROLE pg_monitor", "its log says")],
)
def test_a_task_that_takes_the_right_to_write_from_itself_is_told(
    store: DjangoStore, statement: str, problem: str
):
    """No other try would help."""
    record = claimed(store)
    with pytest.raises(StoreMisconfigured, match=problem), store.transaction(record) as run:
        execute(store.alias, statement)
        settle(run)
    assert store.release(KEY, token=record.token)


@pytest.mark.parametrize(
    "do",
    [
        close_old_connections,
        lambda: connections.close_all(),
        lambda: transaction.set_rollback(True, using=_atomic_alias()),
        lambda: _swallow(transaction.atomic(using=_atomic_alias(), savepoint=False)),
        lambda: _swallow(transaction.mark_for_rollback_on_error(using=_atomic_alias())),
    ],
    ids=["close_old", "close_all", "set_rollback", "savepoint=False", "as a save() does"],
)
def test_a_task_that_breaks_its_transaction_is_told_and_leaves_a_clean_connection(
    store: DjangoStore, do: Callable[[], None]
):
    record = claimed(store)
    with pytest.raises(StoreMisconfigured, match=ENDED), store.transaction(record) as run:
        act(store)
        do()
        settle(run)
    assert effects(store) == 0
    assert not connections[store.alias].needs_rollback
    assert not run.committed()  # waits until the server knows
    acts(store, record)
    assert effects(store) == 1


def _swallow(context: Any) -> None:
    """Go on after an error."""
    with suppress(DatabaseError), context:
        execute(_atomic_alias(), "SELECT * FROM no_such_table")


def _atomic_alias() -> str:
    """The database in whose transaction this thread is."""
    (alias,) = [own.alias for own in connections.all(initialized_only=True) if own.in_atomic_block]
    return str(alias)


def test_an_error_in_an_inner_block_does_no_harm(store: DjangoStore):
    record = claimed(store)
    with store.transaction(record) as run:
        act(store)
        with pytest.raises(DatabaseError), transaction.atomic(using=store.alias):
            act(store)
            execute(store.alias, "SELECT * FROM no_such_table")
        assert settle(run)
    assert effects(store) == 1


def test_it_does_not_run_inside_another_transaction(store: DjangoStore):
    record = claimed(store)
    with (
        pytest.raises(StoreMisconfigured, match="outside of atomic"),
        transaction.atomic(using=store.alias),
        store.transaction(record),
    ):
        act(store)
    assert effects(store) == 0


def test_it_runs_inside_the_blocks_of_a_django_test_case(store: DjangoStore):
    record = claimed(store)
    block: Any = transaction.atomic(using=store.alias)
    block._from_testcase = True
    with block:
        acts(store, record)
        assert effects(store) == 1


@on(*SERVERS)
def test_what_a_lost_commit_came_to_is_found_out(store: DjangoStore):
    record = claimed(store)
    with pytest.raises(DatabaseError), store.transaction(record) as run:
        act(store)
        assert settle(run)
        databases.end_sessions(store.alias, own_only=True)
    assert not run.committed()
    assert effects(store) == 0
    interrupted = store.interrupt(KEY, token=record.token)
    assert interrupted is not None
    assert store.settle(end_of(interrupted, state=State.FAILED, swept=True))
    assert not run.committed(), "it has this claim's token, but a sweep settled it"
    with store.transaction(record) as run:
        assert settle(run)
    assert run.committed()
    assert store.forget(KEY)
    assert not run.committed()
    newer = claimed(store)
    assert not run.committed()
    assert not store.transaction(newer).committed()


@on(*SERVERS)
@pytest.mark.parametrize("ends", ["commits", "rolls back"])
@pytest.mark.parametrize("state", [State.PROCESSING, State.INTERRUPTED])
def test_whoever_asks_waits_for_the_transaction_in_whatever_state_the_record_is(
    store: DjangoStore, state: State, ends: str, monkeypatch: pytest.MonkeyPatch
):
    """What others see of it before the commit says nothing."""
    record = claimed(store, message=b"again", on_stale="requeue")
    looks: list[bool] = []

    def look(run: ClaimTransaction, session: Session) -> bool:
        looks.append(holds_lock(run, session))
        return looks[-1]

    holds_lock = ClaimTransaction._holds_lock
    monkeypatch.setattr(ClaimTransaction, "_holds_lock", look)
    asked = store.transaction(record)
    how: Any = pytest.raises(ZeroDivisionError) if ends == "rolls back" else nullcontext()
    with how, store.transaction(record) as run:
        if state is State.INTERRUPTED:
            assert store.interrupt(KEY, token=record.token)
        assert settle(run)
        committed = in_background(asked.committed)
        wait_for(lambda: len(looks) > 2, 20, "it to look again")
        assert (all(looks), committed.done()) == (True, False)
        if ends == "rolls back":
            raise ZeroDivisionError
    assert committed.result(60) is (ends == "commits")


@on(*SERVERS)
def test_a_run_whose_statement_takes_longer_than_its_lease_keeps_its_key(store: DjangoStore):
    """Nobody renews it: its lock tells whoever finds the lease over that it lives."""
    record = claimed(store, lease_ms=1_000)
    sleep = "pg_sleep" if store.connections.own().vendor == "postgresql" else "sleep"
    with store.transaction(record) as run:
        act(store)
        execute(store.alias, f"SELECT {sleep}(2.5)")
        assert isinstance(claim(store), Held)
        assert store.sweep(limit=10).interrupted == ()
        assert store.prune(limit=10) == 0
        assert settle(run)
    assert effects(store) == 1


@on("sqlite")
def test_on_sqlite_it_has_the_write_lock_from_the_start(store: DjangoStore):
    """With Django's own settings, whose BEGIN takes none."""
    record = claimed(store)
    settings = {**connections[store.alias].settings_dict, "OPTIONS": {"timeout": 0}}
    other = databases.add_alias("other_writer", settings)
    with store.transaction(record), pytest.raises(DatabaseError, match="locked"):
        execute(other, "BEGIN IMMEDIATE")
    execute(other, "BEGIN IMMEDIATE")
    execute(other, "ROLLBACK")
    databases.drop_alias(other)


@on("postgresql", "postgresql serializable", "mariadb")
@pytest.mark.parametrize("settles", [False, True], ids=["while it runs", "before the commit"])
def test_a_frozen_run_is_ended_by_the_server_a_lease_later(store: DjangoStore, settles: bool):
    """Its locks are gone, so the next run need not wait; and when it thaws, it has done nothing."""
    record = claimed(store, lease_ms=2_000)
    with frozen(store, record, act, settles=settles) as thaw:
        answer: Any = wait_for(
            lambda: isinstance(answer := claim(store), Claimed) and answer, 30, interval=0.1
        )
        assert answer.record.crashes == 1
        acts(store, answer.record)
        assert thaw() != "committed"
    assert effects(store) == 1
    left = found(store)
    assert (left.state, left.token) == (State.COMPLETED, answer.record.token)


@pytest.mark.parametrize(
    ("store", "known", "within"),
    [
        *(("postgresql", *each) for each in (("0", "1min"), ("10min", "1min"), ("3s", "3s"))),
        *(("mariadb", *each) for each in ((0, 60), (600, 60), (3, 3))),
    ],
    indirect=["store"],
)
def test_silence_within_it_is_bounded_by_its_lease_or_what_is_shorter(
    store: DjangoStore, known: Any, within: Any
):
    name, ask = "idle_transaction_timeout", "SELECT @@idle_transaction_timeout"
    if store.connections.own().vendor == "postgresql":
        name, ask = (f"{word}idle_in_transaction_session_timeout" for word in ("", "SHOW "))
    record = claimed(store, lease_ms=60_000)
    execute(store.alias, f"SET {name} = {known!r}")
    with store.transaction(record) as run:
        assert rows(store.alias, ask) == [(within,)]
        assert settle(run)
    assert rows(store.alias, ask) == [(known,)]


@on(*SERVERS)
def test_a_row_that_a_frozen_run_holds_stops_no_sweep(store: DjangoStore):
    with frozen(store, claimed(store), act, settles=True):
        other = claimed(store, named("another")).identity
        shift(store, 60_001)
        assert [record.identity for record in store.sweep(limit=10).interrupted] == [other]


@on(*SERVERS)
def test_a_run_does_not_begin_while_an_earlier_session_of_its_claim_is_open(store: DjangoStore):
    """The server may not know yet that a connection was cut."""
    record = claimed(store)
    other = connections.create_connection(store.alias)
    other.inc_thread_sharing()
    lock = f"pg_advisory_lock({POSTGRESQL_LOCK})"
    if other.vendor == "mysql":
        lock = "get_lock(concat('celery_idempotent:', hex(r.digest), r.token), 0)"
    with other.cursor() as cursor:
        cursor.execute(f"SELECT {lock} FROM celery_idempotent_record r")
        with pytest.raises(StoreUnavailable), store.transaction(record):
            pytest.fail("it ran")
    other.close()
    assert effects(store) == 0
