"""The protocol around a run: claim, run, settle, release, replay, and nothing twice."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded

from celery_idempotent import backoff
from celery_idempotent.errors import (
    StoreMisconfigured,
    StoreUnavailable,
)
from celery_idempotent.protocol import claim as claim_module
from celery_idempotent.protocol import lease, shield
from celery_idempotent.protocol import run as protocol
from celery_idempotent.records import (
    Record,
    Reserved,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores import table
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.records import claim_key
from tests.support.runs import IDENTITY, Call, CallRun, Ran, Replay, Runner, StoreFailed


def current_claim() -> Any:
    return claim_module.current_claim()


class TextCodec:
    """Stores anything as its repr, and reads nothing back but that."""

    def dump_value(self, value: Any) -> Stored | None:
        return Stored(
            content_type="text/plain", content_encoding="utf-8", body=repr(value).encode()
        )

    dump_error = dump_value

    def dump_step(self, name: str, value: object) -> Stored | None:
        return self.dump_value(value)

    def load_value(self, stored: Stored) -> str:
        return stored.body.decode()


class FlakyStore:
    """A store whose verbs fail as told: before they reach it, or after, when only the answer is lost."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[str] = []
        self._plans: dict[str, list[tuple[str, type[BaseException]]]] = {}
        self._always: dict[str, Callable[[str], BaseException]] = {}

    def fail(self, verb: str, *errors: type[BaseException], when: str = "before") -> None:
        self._plans.setdefault(verb, []).extend((when, error) for error in errors)

    def fail_always(self, verb: str, error: Callable[[str], BaseException]) -> None:
        self._always[verb] = error

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._store, verb)
        if verb == "joined" or not callable(method):
            return method  # says what it knows, and goes nowhere

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(verb)
            plan = self._plans.get(verb)
            when, error = plan.pop(0) if plan else ("before", self._always.get(verb))
            if error is not None and when == "before":
                raise error("on purpose")
            answer = method(*args, **kwargs)
            if error is not None:
                raise error("on purpose")
            return answer

        return call


class FakeTime:
    """Stands in for the module ``time``: sleeping moves the clock.

    It is ahead of the real one, which the heartbeat goes by: no claim of these tests is due for a renewal.
    """

    START = 1e9

    def __init__(self) -> None:
        self.now = self.START
        self.sleeps: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def memory(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
def store(memory: MemoryStore) -> FlakyStore:
    return FlakyStore(memory)


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    for module in (protocol, shield, backoff):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def execute(store: FlakyStore) -> Callable[..., Any]:
    """Execute a body: ``execute(body)``, with another call, policy, codec or store if need be."""

    def execute(
        body: Callable[[], Any],
        *,
        call: Call | None = None,
        codec: Any = None,
        store: Any = store,
        **policy: Any,
    ) -> Any:
        return make_runner(store, codec=codec, **policy).execute(call or a_call(), body)

    return execute


def make_runner(store: Any, *, codec: Any = None, **policy: Any) -> Runner:
    return Runner(lambda: store, codec or TextCodec(), **policy)


def a_call(task_id: str = "t1", **more: Any) -> Call:
    return Call(task_id=task_id, **more)


def claim(store: Any, task_id: str = "other", *, lease_ms: int = 60_000) -> Record:
    return claim_key(
        store, IDENTITY, lease_ms=lease_ms, keep_ms=1000_000, task_id=task_id, worker="other:2"
    )


def settle(store: Any, record: Record, body: bytes = b"'theirs'") -> None:
    value = Stored(content_type="text/plain", content_encoding="utf-8", body=body)
    assert store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=value, keep_ms=1000_000)
    )


def text_of(record: Record) -> bytes:
    assert record.value is not None
    return record.value.body


def raising(error: BaseException) -> Callable[[], Any]:
    def body() -> Any:
        raise error

    return body


def never() -> Any:
    pytest.fail("the body ran")


class TestRunning:
    def test_without_retention_the_end_of_a_call_that_was_sent_twice_is_kept_for_a_day(
        self, execute, memory, clock, monkeypatch
    ):
        """Its copy may wait in a queue."""
        monkeypatch.setattr(table, "COPIES_MS", 24 * 3_600_000)  # the model of tests/proof has none
        for copies in ((), ("t1",)):
            request = ReserveRequest(
                identity=IDENTITY, task_id="t1", deadline_ms=1000, keep_ms=1000, copies=copies
            )
            assert isinstance(memory.reserve(request), Reserved)
            assert execute(lambda: 1, retention_ms=0) == Ran(1)
            clock.advance(23 * 3_600_000)
            assert (memory.get(IDENTITY) is not None) is bool(copies)


class TestEndings:
    """Every row of the table in docs/internals.md."""

    @pytest.mark.parametrize(
        "kind",
        [
            *(ValueError, StopIteration, MemoryError, RecursionError, StoreUnavailable),
            *(Retry, Ignore, Reject, SoftTimeLimitExceeded),
            *(SystemExit, KeyboardInterrupt, GeneratorExit, type("Killed", (BaseException,), {})),
        ],
    )
    def test_an_exception_gives_the_key_back_and_goes_on(self, execute, memory, heard, kind):
        error = kind()
        with pytest.raises(type(error)) as caught:
            execute(raising(error))
        assert caught.value is error
        assert memory.get(IDENTITY) is None
        assert heard.names == ["claimed", "released"]
        assert execute(lambda: "again") == Ran("again")

    def test_a_permanent_error_fails_the_record_and_goes_on(self, execute, memory, heard):
        error = KeyError("no such order")
        with pytest.raises(KeyError) as caught:
            execute(raising(error), permanent_errors=(ValueError, LookupError))
        assert caught.value is error
        record = memory.get(IDENTITY)
        assert record.state is State.FAILED
        assert record.value.body == b"KeyError('no such order')"
        assert heard.names == ["claimed", "settled"]
        assert execute(never) == Replay(record, 0)


class TestPoison:
    def test_a_stale_claim_is_taken_over_and_counts_a_crash(self, execute, memory, clock):
        claim(memory, lease_ms=1000)
        clock.advance(1000)
        assert execute(lambda: current_claim().crashes) == Ran(1)

    def crash(self, memory: MemoryStore, times: int) -> None:
        for _ in range(times):
            memory.interrupt(IDENTITY, token=claim(memory).token)

    @pytest.mark.parametrize(
        ("crashes", "policy", "verdict"),
        [(4, {}, b"TooManyCrashes("), (1, {"on_stale": "fail"}, b"ProcessingTimedOut(")],
    )
    def test_one_crash_more_than_allowed_fails_it_without_a_run(
        self, execute, memory, heard, crashes, policy, verdict
    ):
        self.crash(memory, crashes - 1)
        with pytest.raises(ValueError):
            execute(raising(ValueError()), **policy)
        self.crash(memory, crashes)
        answer = execute(never, **policy)
        assert isinstance(answer, Replay)
        assert answer.record.state is State.FAILED
        assert text_of(answer.record).startswith(verdict)
        assert heard.names[-2:] == ["settled", "replayed"]

    @pytest.mark.parametrize("policy", ["closed", "open"])
    def test_a_verdict_that_cannot_be_written_lets_the_message_come_back(
        self, execute, memory, store, heard, caplog, policy
    ):
        self.crash(memory, 4)
        store.fail("settle", StoreUnavailable)
        assert isinstance(execute(never, on_store_error=policy), StoreFailed)
        assert heard.names == ["store_failed"]
        assert "took effect" not in caplog.text


class TestObserving:
    def test_an_exception_of_a_run_that_lost_its_key_is_raised_all_the_same(
        self, execute, memory, clock
    ):
        def body() -> None:
            clock.advance(1001)
            claim(memory)
            raise ValueError("declined")

        with pytest.raises(ValueError, match="declined"):
            execute(body, mode="observe", lease_ms=1000)

    def test_a_step_runs_each_time(self, execute):
        ran: list[int] = []

        def body(fails: bool) -> None:
            current_claim().step("charge", lambda: ran.append(1))
            if fails:
                raise ValueError

        with pytest.raises(ValueError):
            execute(partial(body, True), mode="observe")
        execute(partial(body, False), mode="observe")
        assert ran == [1, 1]

    @pytest.mark.parametrize("how", ["the store is away", "the claim is gone"])
    def test_a_run_goes_on_where_its_claim_cannot_be_renewed(self, execute, memory, store, how):
        def body() -> str:
            if how == "the store is away":
                store.fail_always("renew", StoreUnavailable)
            else:
                memory.forget(IDENTITY)
            current_claim().ensure()
            current_claim().renew()
            return "done"

        assert execute(body, mode="observe", lease_ms=200) == Ran("done")


class TestLostLease:
    def test_the_late_result_is_dropped_and_the_winner_answers(
        self, execute, memory, clock, heard, caplog
    ):
        def body() -> str:
            clock.advance(1001)
            settle(memory, claim(memory, "winner"))
            return "late"

        answer = execute(body, lease_ms=1000)
        assert isinstance(answer, Replay)
        assert text_of(answer.record) == b"'theirs'"
        assert answer.record.task_id == "winner"
        assert heard.names == ["claimed", "lease_lost", "replayed"]
        assert "its result is dropped" in caplog.text

    @pytest.mark.parametrize(
        ("error", "permanent"), [(ValueError, ()), (ValueError, (ValueError,)), (SystemExit, ())]
    )
    def test_a_late_failure_does_nothing_to_a_newer_claim(
        self, execute, memory, clock, error, permanent
    ):
        theirs = []

        def body() -> None:
            clock.advance(1001)
            theirs.append(claim(memory))
            raise error

        try:
            answer = execute(body, lease_ms=1000, permanent_errors=permanent)
        except SystemExit:
            assert error is SystemExit
        else:
            assert answer.record.task_id == "other"
        found = memory.get(IDENTITY)
        assert (found.state, found.token, found.task_id) == (
            State.PROCESSING,
            theirs[0].token,
            "other",
        )


class TestStoreFailures:
    def test_a_claim_whose_answer_was_lost_does_not_meet_itself(
        self, execute, store, memory, fake_time
    ):
        store.fail("claim", StoreUnavailable, when="after")
        assert execute(lambda: current_claim().crashes) == Ran(0)
        assert memory.get(IDENTITY).attempts == 1

    def test_a_release_whose_answer_was_lost_swallows_no_exception(
        self, execute, store, memory, heard
    ):
        """The next run of the key claims before the release is asked for again."""
        store.fail("release", StoreUnavailable, when="after")
        ask = store.__getattr__("release")

        def release(*args: Any, **kwargs: Any) -> Any:
            try:
                return ask(*args, **kwargs)
            finally:
                if memory.get(IDENTITY) is None:
                    claim(memory)

        store.release = release
        with pytest.raises(ValueError, match="declined"):
            execute(raising(ValueError("declined")))
        assert heard.names == ["claimed", "released"]

    def test_a_claim_that_was_given_up_is_taken_back_when_the_store_answers(
        self, execute, store, memory, fake_time, monkeypatch
    ):
        heartbeat = lease.Heartbeat()
        monkeypatch.setattr(heartbeat, "start", lambda: None)
        monkeypatch.setattr(protocol, "heartbeat", heartbeat)
        store.fail("claim", *[StoreUnavailable] * 20, when="after")
        store.fail("take_back", StoreUnavailable)
        assert isinstance(execute(never), StoreFailed)
        assert memory.get(IDENTITY).state is State.PROCESSING
        (given_up,) = heartbeat._given_up
        while memory.get(IDENTITY) is not None:
            given_up.due = 0.0
            heartbeat._undo_due()
        # The command may be late: the key is looked at again, as long as another claim does not have it.
        theirs = claim(memory)
        given_up.due = 0.0
        heartbeat._undo_due()
        assert memory.get(IDENTITY) == theirs

    def test_a_settle_is_repeated_for_at_least_a_lease(
        self, execute, store, memory, heard, fake_time, caplog
    ):
        store.fail_always("settle", StoreUnavailable)
        assert execute(lambda: 1, lease_ms=20_000) == Ran(1)
        assert 15 <= fake_time.now - fake_time.START <= 25
        assert heard.names == ["claimed", "settle_failed"]
        assert isinstance(heard.events[-1][2].error, StoreUnavailable)
        assert [r.levelname for r in caplog.records if r.levelname != "DEBUG"] == ["CRITICAL"]
        assert memory.get(IDENTITY).state is State.PROCESSING
        assert not lease.heartbeat._due

    @pytest.mark.parametrize("outcome", ["settled", "lease_lost", "settle_failed"])
    def test_a_settle_for_which_the_caller_does_not_wait_goes_on_in_the_heartbeat(
        self, execute, store, memory, heard, fake_time, clock, monkeypatch, outcome
    ):
        def no_answer(text: str) -> Any:
            fake_time.now += silence
            return error(text)

        def again() -> None:
            given_up.due = 0.0
            heartbeat._undo_due()

        heartbeat = lease.Heartbeat()
        monkeypatch.setattr(heartbeat, "start", lambda: None)
        monkeypatch.setattr(protocol, "heartbeat", heartbeat)
        monkeypatch.setattr(CallRun, "settle_seconds", 3.0)
        # The store is silent, or refuses everything.
        silence, error = (
            (5.0, StoreUnavailable) if outcome == "settled" else (0.0, StoreMisconfigured)
        )
        store.fail_always("settle", no_answer)
        assert execute(lambda: 1, lease_ms=20_000) == Ran(1)
        assert 2 < fake_time.now - fake_time.START < (6 if silence else 3.1)
        (given_up,) = heartbeat._given_up
        heartbeat._due = dict.fromkeys(heartbeat._due, 0.0)
        heartbeat._renew_due()
        assert store.calls[-1] == "renew", "it keeps its lease meanwhile"
        again()
        assert heard.names == ["claimed"]
        if outcome == "settle_failed":
            fake_time.now += 20
        else:
            store._always.clear()
        if outcome == "lease_lost":
            clock.advance(20_001)
            claim(memory)
        again()
        again()
        assert heard.names == ["claimed", outcome]

    def test_no_error_during_the_settle_ends_it(self, execute, store, memory, fake_time):
        """Also none that another try would not help elsewhere: without the record the effect is repeated."""
        errors = SoftTimeLimitExceeded, StoreMisconfigured, ZeroDivisionError
        store.fail("settle", StoreUnavailable, *errors)
        assert execute(lambda: 1) == Ran(1)
        assert memory.get(IDENTITY).state is State.COMPLETED

    def test_an_exit_during_the_settle_leaves_the_key_to_its_lease(self, execute, store, memory):
        store.fail("settle", SystemExit)
        with pytest.raises(SystemExit):
            execute(lambda: 1)
        assert memory.get(IDENTITY).state is State.PROCESSING
        assert store.calls == ["claim", "settle"]

    def test_a_process_that_is_being_ended_does_not_wait_to_release(
        self, execute, store, fake_time
    ):
        store.fail_always("release", StoreUnavailable)
        with pytest.raises(SystemExit):
            execute(raising(SystemExit(1)))
        assert fake_time.sleeps == []
        assert store.calls == ["claim", "release"]


class TestAFailureThatSomebodyAsksFor:
    ASKED = a_call(keep_failure=True, control=(Retry,))

    def test_is_none_if_it_says_that_it_runs_again_although_all_errors_are_permanent(
        self, execute, memory
    ):
        with pytest.raises(Retry):
            execute(raising(Retry()), call=self.ASKED, permanent_errors=(Exception,))
        assert memory.get(IDENTITY) is None

    @pytest.mark.parametrize("error", [ValueError(), Retry(), SystemExit()])
    def test_keeps_a_step_that_was_done_and_is_no_end_then(self, execute, memory, error):
        charged: list[int] = []

        def body() -> None:
            current_claim().step("charge", lambda: charged.append(1))
            raise error

        for _ in range(2):
            with pytest.raises(type(error)):
                execute(body, call=self.ASKED)
            assert memory.get(IDENTITY).state is State.INTERRUPTED
        assert charged == [1]
