"""A run in a transaction of its store: its effects and its end are committed together, or not at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotencyError, backoff
from celery_idempotent.celery.receivers import make_store
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.errors import InvalidOption, LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol import atomic, claiming, endings, runner
from celery_idempotent.protocol.calls import Conflict, Ran, Replay, StoreFailed
from celery_idempotent.protocol.policy import read_task_options
from celery_idempotent.records import Identity, Record, SettleRequest, State
from celery_idempotent.stores.deciding import Asked, StoredRecord, decide
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from celery_idempotent.testing.delivery import message_of, run
from tests.unit.test_runner import (
    IDENTITY,
    FakeTime,
    a_call,
    claim,
    current_claim,
    listening,
    make_runner,
    names,
    settle,
    text_of,
)

EFFECT = Identity(namespace="ledger", key="the effect")


class DatabaseError(Exception):
    """What a database raises at a commit."""


class Collision(DatabaseError):
    """Two transactions that cannot both be committed."""


class Database(MemoryStore):
    """Records in memory, and one row beside them, written in one transaction with its record."""

    supports_transactions = True

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        super().__init__(clock)
        self.at_begin: Exception | None = None
        self.at_settle: Exception | Callable[[], None] | None = None
        self.at_commit: Callable[[], None] = lambda: None
        self.after_commit: Callable[[], None] = lambda: None
        self.open: Transaction | None = None

    def transaction(self, record: Record | None) -> Any:
        return Transaction(self, record)

    def abandon(self, record: Record) -> None:
        self.open = None

    def committed(self, record: Record) -> bool:
        found = self.get(record.identity)
        return found is not None and found.token == record.token and found.state.settled

    @property
    def effect(self) -> bool:
        """Was the row committed?"""
        return EFFECT in self.records

    def write(self) -> None:
        """What a task does."""
        assert self.open is not None, "the body runs outside of its transaction"
        self.open.pending[EFFECT] = StoredRecord(a_record(), 2**62)


def a_record() -> Record:
    return Record(identity=EFFECT, state=State.COMPLETED, token=1, created_ms=0, updated_ms=0)


class Transaction:
    def __init__(self, store: Database, record: Record | None) -> None:
        self.store = store
        self.record = record
        self.pending: dict[Identity, StoredRecord] = {}

    def __enter__(self) -> Transaction:
        if self.store.at_begin is not None:
            raise self.store.at_begin
        self.store.open = self
        return self

    def __exit__(self, kind: Any, error: Any, _: Any) -> None:
        self.store.open = None
        if error is None:
            self.store.at_commit()
            self.store.records.update(self.pending)  # one instruction: a commit is that, too
            self.store.after_commit()

    def passes(self, error: Exception) -> bool:
        return isinstance(error, Collision)

    def outside(self) -> Any:
        return nullcontext()

    def settle(self, request: SettleRequest) -> bool:
        if isinstance(self.store.at_settle, Exception):
            raise self.store.at_settle
        if self.store.at_settle is not None:
            self.store.at_settle()
        assert self.record is not None
        stored, now = self.store.records.get(self.record.identity), self.store._clock() // 1000
        asked = Asked(
            fields={
                "state": request.state,
                "value": request.value,
                "replaced": request.replaced,
            },
            token=self.record.token,
            keep_ms=request.keep_ms,
            restore=False,
            claim=self.record,
        )
        move = decide("settle", stored, asked, now)
        if move.writes:
            self.pending[self.record.identity] = move.after(stored, asked, now, 0)
        return move.answer == "settled"


def failing(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def database(clock: FakeClock) -> Database:
    return Database(clock)


@pytest.fixture
def execute(database: Database) -> Callable[..., Any]:
    def execute(body: Callable[[], Any], *, task_id: str = "t1", **policy: Any) -> Any:
        return make_runner(database, atomic=True, **policy).execute(a_call(task_id), body)

    return execute


@pytest.fixture
def events() -> Iterator[list[tuple[str, Any]]]:
    seen: list[tuple[str, Any]] = []
    with listening(lambda name, event: seen.append((name, event))):
        yield seen


@pytest.fixture(autouse=True)
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in (runner, claiming, endings, backoff):
        monkeypatch.setattr(module, "time", fake)
    return fake


def writing(database: Database, then: Any = 42) -> Callable[[], Any]:
    def body() -> Any:
        database.write()
        if isinstance(then, BaseException):
            raise then
        return then() if callable(then) else then

    return body


class TestEnds:
    def test_a_permanent_error_rolls_back_and_is_kept(self, execute, database):
        with pytest.raises(ValueError):
            execute(writing(database, ValueError()), permanent_errors=(ValueError,))
        assert not database.effect
        assert database.get(IDENTITY).state is State.FAILED

    def test_a_coroutine_that_nobody_ran_rolls_back_and_frees_the_key(self, execute, database):
        async def later() -> None: ...

        with pytest.raises(IdempotencyError, match="a coroutine that was not run"):
            execute(writing(database, later))
        assert not database.effect
        assert database.get(IDENTITY) is None

    def test_an_exit_rolls_back_and_frees_the_key(self, execute, database):
        with pytest.raises(SystemExit):
            execute(writing(database, SystemExit()))
        assert not database.effect
        assert database.get(IDENTITY) is None

    def test_the_claim_knows_the_transaction_while_it_lasts(self, execute, database):
        claims = []

        def body() -> None:
            claims.append(current_claim())
            assert claims[0].transaction is database.open

        execute(body)
        assert claims[0].transaction is None

    def test_steps_are_recorded_whatever_becomes_of_the_transaction(self, database):
        class StepCodec:
            def dump_step(self, name: str, value: Any) -> Any:
                return value

            def load_value(self, stored: Any) -> Any:
                return stored

            dump_value = dump_error = staticmethod(lambda _: None)

        def body() -> None:
            current_claim().step("charge", lambda: "stored")
            raise ValueError

        run = make_runner(database, codec=StepCodec(), atomic=True)
        with pytest.raises(ValueError):
            run.execute(a_call(), body)
        assert database.get(IDENTITY).steps == (("charge", "stored"),)


class TestNewerClaims:
    def test_a_late_run_is_rolled_back_and_goes_on_as_a_duplicate(
        self, execute, database, clock, events
    ):
        def body() -> None:
            database.write()
            clock.advance(1001)
            claim(database)

        assert isinstance(execute(body, lease_ms=1000), Conflict)
        assert not database.effect
        assert names(events) == ["claimed", "lease_lost", "conflicted"]

    def test_it_answers_with_the_winners_result(self, execute, database, clock):
        def body() -> str:
            database.write()
            clock.advance(1001)
            settle(database, claim(database))
            return "late"

        result = execute(body, lease_ms=1000)
        assert text_of(result.record) == b"'theirs'"
        assert not database.effect

    def test_one_whose_session_was_ended_goes_on_as_a_duplicate(self, execute, database, clock):
        def body() -> None:
            clock.advance(1001)
            claim(database)
            raise DatabaseError("terminating connection due to administrator command")

        assert isinstance(execute(body, lease_ms=1000), Conflict)

    def test_one_that_is_late_before_it_began_goes_on_as_a_duplicate(
        self, execute, database, clock, monkeypatch
    ):
        def begin(record: Record | None) -> Any:
            monkeypatch.undo()
            clock.advance(1001)
            claim(database)
            database.at_begin = LeaseLost("too late")
            return Database.transaction(database, record)

        monkeypatch.setattr(database, "transaction", begin)
        assert isinstance(execute(lambda: pytest.fail("it ran"), lease_ms=1000), Conflict)

    def test_a_forgotten_run_is_rolled_back_and_runs_again(self, execute, database):
        runs = []

        def body() -> int:
            runs.append(1)
            database.write()
            if len(runs) == 1:
                database.forget(IDENTITY)
            return len(runs)

        assert execute(body) == Ran(2)
        assert database.effect


class TestCommits:
    def test_one_that_nobody_knows_about_sends_the_message_back(self, database, fake_time):
        database.committed = failing(StoreUnavailable())
        database.after_commit = failing(DatabaseError())
        began = fake_time.now
        run = make_runner(database, atomic=True, lease_ms=5000)
        result = run.execute(a_call(), writing(database))
        assert isinstance(result, StoreFailed)
        assert 5 <= fake_time.now - began <= 10, "a lease, and not much longer"
        # The message comes back, and the record answers.
        assert isinstance(run.execute(a_call(), writing(database)), Replay)

    def test_one_that_failed_while_somebody_else_took_the_key(self, execute, database, clock):
        def fail() -> None:
            clock.advance(1001)
            claim(database)
            raise DatabaseError

        database.at_commit = fail
        assert isinstance(execute(writing(database), lease_ms=1000), Conflict)
        assert not database.effect


class Colliding:
    """A database whose settle, or commit, collides so many times."""

    def __init__(self, database: Database, where: str, times: int) -> None:
        self.times = times
        self.database = database
        setattr(database, "at_settle" if where == "settle" else "at_commit", self)

    def __call__(self) -> None:
        if self.times:
            self.times -= 1
            raise Collision


@pytest.mark.parametrize("where", ["settle", "commit"])
class TestCollisionsAtTheEnd:
    def test_the_body_runs_again_at_once(self, execute, database, events, where):
        Colliding(database, where, atomic.MAX_REPEATS)
        runs = []
        assert execute(writing(database, lambda: len(runs.append(1) or runs))) == Ran(5)
        assert database.effect
        assert names(events) == ["claimed", "released"] * 4 + ["claimed", "settled"]

    def test_and_again_only_a_few_times(self, execute, database, where):
        Colliding(database, where, atomic.MAX_REPEATS + 1)
        with pytest.raises(Collision):
            execute(writing(database))
        assert not database.effect
        assert database.get(IDENTITY) is None

    def test_then_it_is_the_tasks_as_if_the_body_had_raised_it(self, database, where):
        Colliding(database, where, 99)
        retried = KeyError("a retry")
        asked: list[Exception] = []
        call = replace(a_call(), on_late_error=lambda error: asked.append(error) or retried)
        with pytest.raises(KeyError) as caught:
            make_runner(database, atomic=True).execute(call, writing(database))
        assert caught.value is retried
        assert [type(error) for error in asked] == [Collision]

    def test_a_permanent_one_is_kept(self, execute, database, where):
        Colliding(database, where, 99)
        with pytest.raises(Collision):
            execute(writing(database), permanent_errors=(Collision,))
        assert database.get(IDENTITY).state is State.FAILED

    def test_a_duplicate_that_was_faster_answers(self, database, where, fake_time):
        """Between two runs the key is free."""
        Colliding(database, where, 1)
        fake_time.sleep = lambda _: settle(database, claim(database))
        result = make_runner(database, atomic=True).execute(a_call(), writing(database))
        assert text_of(result.record) == b"'theirs'"
        assert not database.effect


class TestTrouble:
    def test_without_a_transaction_nothing_runs(self, execute, database, events):
        database.at_begin = StoreUnavailable("gone")
        result = execute(lambda: pytest.fail("it ran"))
        assert isinstance(result, StoreFailed)
        assert result.error is database.at_begin
        assert database.get(IDENTITY) is None
        assert names(events) == ["claimed", "released", "store_failed"]

    def test_a_message_that_is_kept_outlives_that_until_it_comes_round_again(self, database):
        run = make_runner(database, atomic=True, on_stale="requeue")
        database.at_begin = StoreUnavailable("gone")
        result = run.execute(replace(a_call(), message=b"again"), writing(database))
        assert isinstance(result, StoreFailed)
        record = database.get(IDENTITY)
        assert (record.state, record.message) == (State.QUEUED, b"again")
        database.at_begin = None
        assert run.execute(a_call(), writing(database)) == Ran(42)

    def test_without_a_settle_nothing_is_committed(self, execute, database):
        database.at_settle = StoreUnavailable("gone")
        result = execute(writing(database))
        assert isinstance(result, StoreFailed)
        assert result.error is database.at_settle
        assert not database.effect
        assert database.get(IDENTITY) is None

    def test_a_task_that_ended_its_transaction_is_told_so_and_not_run_again(
        self, execute, database
    ):
        database.at_settle = StoreMisconfigured("the task committed")
        with pytest.raises(StoreMisconfigured, match="the task committed"):
            execute(writing(database))
        assert database.get(IDENTITY) is None

    def test_a_store_error_of_the_body_itself_is_the_bodys(self, execute, database):
        with pytest.raises(StoreUnavailable):
            execute(writing(database, StoreUnavailable("another store")))
        assert not database.effect

    def test_a_store_without_transactions(self):
        result = make_runner(MemoryStore(), atomic=True).execute(a_call(), lambda: 42)
        assert isinstance(result.error, StoreMisconfigured)
        assert "idempotency_store" in str(result.error)

    def test_it_cannot_be_open(self):
        class Open:
            idempotency_atomic = True
            idempotency_on_store_error = "open"

        with pytest.raises(InvalidOption, match="atomic"):
            read_task_options(Open, "t", lambda _, default: default)


class TestRetries:
    def test_one_is_published_when_all_is_rolled_back_and_the_key_is_free(self, execute, database):
        published = []

        def publish() -> None:
            assert not database.effect
            published.append(database.open)
            run.release(taken[0])

        taken = []
        run = make_runner(database, atomic=True)

        def body() -> None:
            database.write()
            taken.append(current_claim())
            taken[0].after_rollback = publish
            raise ValueError

        with pytest.raises(ValueError):
            run.execute(a_call(), body)
        assert published == [None]
        assert database.get(IDENTITY) is None

    def test_a_body_that_returns_after_it_asked_for_one_is_rolled_back(self, database):
        run = make_runner(database, atomic=True)

        def body() -> str:
            database.write()
            taken = current_claim()
            taken.after_rollback = lambda: run.release(taken)
            return "throw=False"

        assert run.execute(a_call(), body) == Ran("throw=False")
        assert not database.effect
        assert database.get(IDENTITY) is None


class TestUnguarded:
    def test_what_its_commit_raised_is_the_tasks_when_observing(self, execute, database):
        assert execute(writing(database), mode="observe") == Ran(42)
        database.at_commit = failing(Collision())
        call = replace(a_call("t2"), on_late_error=lambda _: KeyError("a retry"))
        with pytest.raises(KeyError):
            make_runner(database, atomic=True, mode="observe").execute(call, writing(database))

    def test_a_body_that_expects_a_transaction_has_one_when_observing(self, execute, database):
        assert execute(writing(database), mode="observe") == Ran(42)
        assert database.get(IDENTITY).state is State.COMPLETED
        del database.records[EFFECT]
        assert execute(writing(database), task_id="t2", mode="observe") == Ran(42)
        assert database.effect


class TestWorkerStart:
    def app(self, store: Any, **options: Any) -> Celery:
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.idempotency_store = store

        @app.task(base=IdempotentTask, name="shop.charge", shared=False, **options)
        def charge(order: int) -> None: ...

        return app

    def test_a_worker_does_not_start_with_an_atomic_task_that_its_store_cannot_serve(self):
        app = self.app(MemoryStore(), idempotency_atomic=True)
        with pytest.raises(SystemExit, match=r"shop\.charge is atomic.*django://"):
            make_store(SimpleNamespace(app=app, time_limit=None))

    def test_it_starts_where_the_store_can(self):
        make_store(
            SimpleNamespace(app=self.app(Database(), idempotency_atomic=True), time_limit=None)
        )
        make_store(SimpleNamespace(app=self.app(MemoryStore()), time_limit=None))


def test_a_message_that_was_rolled_back_comes_back_as_it_was(database: Database) -> None:
    """Whatever the body did to its arguments: the next run gets those of the caller."""
    app = Celery("atomic", broker="memory://", set_as_current=False)
    app.conf.update(idempotency_store=database, task_ignore_result=True)
    seen = []

    @app.task(name="t", base=IdempotentTask, shared=False, idempotency_atomic=True)
    def task(items: list[str]) -> None:
        seen.append(list(items))
        items.clear()

    with app:
        database.at_settle = StoreUnavailable("the row is locked")
        first = run(task, message_of(task, (["a", "b"],), {}))
        (again,) = first.published
        database.at_settle = None
        run(task, again)
    assert seen == [["a", "b"]] * 2
