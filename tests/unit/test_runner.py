"""The protocol around a run: claim, run, settle, release, replay, and nothing twice."""

from __future__ import annotations

import logging
import opcode
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import Any, ClassVar

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from celery.utils.dispatch import Signal

from celery_idempotent import backoff, signals
from celery_idempotent.errors import (
    StoreUnavailable,
)
from celery_idempotent.protocol import claim as claim_module
from celery_idempotent.protocol import claiming, endings, lease, runner
from celery_idempotent.protocol.calls import Call, Conflict, Ran, Replay, StoreFailed
from celery_idempotent.protocol.claiming import AnsweredAttempt, Claiming
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.runner import Runner
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.forwarding import ForwardingStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock

IDENTITY = Identity(namespace="shop.charge", key="order-17")
SIGNALS = {name: each for name, each in vars(signals).items() if isinstance(each, Signal)}


def current_claim() -> Any:
    return claim_module.current_claim()


class TextCodec:
    """Stores anything as its repr."""

    def dump_value(self, value: Any) -> Stored | None:
        return Stored(
            content_type="text/plain", content_encoding="utf-8", body=repr(value).encode()
        )

    dump_error = dump_value


class FlakyStore:
    """A store whose verbs fail as told: before they reach it, or after, when only the answer is lost."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.calls: list[str] = []
        self.attempts: list[bytes] = []
        self._plans: dict[str, list[tuple[str, type[BaseException]]]] = {}
        self._always: dict[str, type[BaseException]] = {}

    def fail(self, verb: str, *errors: type[BaseException], when: str = "before") -> None:
        self._plans.setdefault(verb, []).extend((when, error) for error in errors)

    def fail_always(self, verb: str, error: type[BaseException]) -> None:
        self._always[verb] = error

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        method: Callable[..., Any] = getattr(self._store, verb)
        if verb == "joined" or not callable(method):
            return method  # says what it knows, and goes nowhere

        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append(verb)
            if verb == "claim":
                self.attempts.append(args[0].attempt)
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
    for module in (runner, claiming, endings, backoff):
        monkeypatch.setattr(module, "time", fake)
    return fake


@pytest.fixture
def events() -> Iterator[list[tuple[str, signals.Event]]]:
    """The names and events of all signals in the order of their sending."""
    seen: list[tuple[str, signals.Event]] = []
    with listening(lambda name, event: seen.append((name, event))):
        yield seen


@contextmanager
def listening(tell: Callable[[str, signals.Event], object]) -> Iterator[None]:
    receivers = {}
    for name, each in SIGNALS.items():

        def receive(sender: object, event: signals.Event, name: str = name, **_: object) -> None:
            tell(name, event)

        each.connect(receive, weak=False)
        receivers[name] = receive
    try:
        yield
    finally:
        for name, each in SIGNALS.items():
            each.disconnect(receivers[name])


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> Callable[[Signal, type[BaseException]], None]:
    """Let a signal handler raise once, while an outcome is reported."""

    def struck(outcome: Signal, error: type[BaseException]) -> None:
        send, errors = outcome.send, [error]

        def strike(**about: object) -> None:
            send(**about)
            if errors:
                raise errors.pop()

        monkeypatch.setattr(outcome, "send", strike)

    return struck


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
    return Runner(
        "shop.charge",
        policy=Policy(**policy),
        store=lambda: store,
        codec=codec or TextCodec(),  # type: ignore[arg-type]  # no steps here
        sender=lambda: "sender",
    )


def a_call(
    task_id: str = "t1",
    *,
    fingerprint: bytes | None = None,
    identity: Identity = IDENTITY,
) -> Call:
    return Call(identity=identity, fingerprint=fingerprint, task_id=task_id, worker="host:1")


def claim(store: Any, task_id: str = "other", *, lease_ms: int = 60_000) -> Record:
    answer = store.claim(
        ClaimRequest(
            identity=IDENTITY,
            attempt=random.randbytes(8),
            lease_ms=lease_ms,
            keep_ms=1000_000,
            task_id=task_id,
            worker="other:2",
        )
    )
    assert isinstance(answer, Claimed)
    return answer.record


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


def names(events: list[tuple[str, signals.Event]]) -> list[str]:
    return [name for name, _ in events]


class TestRunning:
    def test_a_value_completes_the_record_and_is_returned(self, execute, memory, events):
        assert execute(lambda: 42) == Ran(42)
        record = memory.get(IDENTITY)
        assert record.state is State.COMPLETED
        assert record.value.body == b"42"
        assert record.task_id == "t1"
        assert names(events) == ["claimed", "settled"]

    def test_the_claim_is_known_inside_the_run_and_nowhere_else(self, execute):
        seen = []
        assert current_claim() is None
        execute(lambda: seen.append(current_claim()))
        (known,) = seen
        assert (known.key, known.scope, known.crashes) == ("order-17", "", 0)
        assert current_claim() is None

    def test_a_run_inside_a_run_has_a_claim_of_its_own(self, execute):
        inner = a_call(identity=Identity(namespace="shop.mail", key="1"))
        seen = []

        def outer() -> None:
            execute(lambda: seen.append(current_claim().key), call=inner)
            seen.append(current_claim().key)

        execute(outer)
        assert seen == ["1", "order-17"]

    def test_without_retention_the_mark_is_kept_for_one_lease(self, execute, memory, clock):
        execute(lambda: 1, retention_ms=0, lease_ms=7000)
        clock.advance(6999)
        assert memory.get(IDENTITY).state is State.COMPLETED
        clock.advance(1)
        assert memory.get(IDENTITY) is None

    def test_without_retention_the_mark_answers_its_own_message_alone(self, execute):
        """Only runs at the same time exclude each other; a redelivery after the end is no run."""
        assert execute(lambda: 1, retention_ms=0) == Ran(1)
        assert isinstance(execute(lambda: 2, retention_ms=0), Replay)
        other = a_call(task_id="another", fingerprint=b"f" * 16)
        assert execute(lambda: 3, retention_ms=0, call=other) == Ran(3)

    def test_without_retention_one_of_many_takes_the_key_of_the_last_run(self, execute, memory):
        """Two find the mark, and both forget it: the slower one must not forget the claim of the other."""
        execute(lambda: 1, retention_ms=0)
        late, first = a_call(task_id="late"), a_call(task_id="first")
        seen: list[Any] = []

        class Slow(ForwardingStore):
            def forget(self, *args: Any, **kwargs: Any) -> bool:
                def body() -> int:
                    seen.append(memory.forget(*args, **kwargs))
                    seen.append(execute(lambda: 9, retention_ms=0, call=late))
                    return 2

                if seen:
                    forgotten: bool = memory.forget(*args, **kwargs)
                    return forgotten
                seen.append(execute(body, retention_ms=0, call=first))
                return False

        outcome = execute(lambda: 3, retention_ms=0, call=late, store=Slow(memory))
        assert outcome == Ran(3)
        forgotten, conflict, ran = seen
        assert forgotten is False
        assert isinstance(conflict, Conflict)
        assert ran == Ran(2)


class TestEndings:
    """Every row of the table in docs/life-of-a-record.md."""

    @pytest.mark.parametrize(
        "error",
        [
            ValueError("x"),
            Retry("later"),
            Ignore(),
            Reject("no"),
            SoftTimeLimitExceeded(),
            SystemExit(1),
            KeyboardInterrupt(),
            type("GreenletExit", (BaseException,), {})(),
            StopIteration(),
            GeneratorExit(),
            StoreUnavailable("the body's own"),
            MemoryError(),
            RecursionError(),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_an_exception_gives_the_key_back_and_goes_on(self, execute, memory, events, error):
        with pytest.raises(type(error)) as caught:
            execute(raising(error))
        assert caught.value is error
        assert memory.get(IDENTITY) is None
        assert names(events) == ["claimed", "released"]
        assert execute(lambda: "again") == Ran("again")

    def test_a_permanent_error_fails_the_record_and_goes_on(self, execute, memory, events):
        error = KeyError("no such order")
        with pytest.raises(KeyError) as caught:
            execute(raising(error), permanent_errors=(ValueError, LookupError))
        assert caught.value is error
        record = memory.get(IDENTITY)
        assert record.state is State.FAILED
        assert record.value.body == b"KeyError('no such order')"
        assert names(events) == ["claimed", "settled"]
        assert execute(never) == Replay(record, 0)


class TestDuplicates:
    def test_a_stale_claim_is_taken_over_and_counts_a_crash(self, execute, memory, clock):
        claim(memory, lease_ms=1000)
        clock.advance(1000)
        assert execute(lambda: current_claim().crashes) == Ran(1)

    def test_a_run_after_a_crash_is_told_with_its_key_and_no_other_is(
        self, execute, memory, caplog
    ):
        def fail() -> None:
            raise ValueError

        with pytest.raises(ValueError):
            execute(fail)
        assert "runs" not in caplog.text
        memory.interrupt(IDENTITY, token=claim(memory).token)
        execute(lambda: 42)
        told = f"task t1 (shop.charge) runs {IDENTITY} again (crash 1, attempt 2)"
        assert caplog.text.count(told) == 1

    def test_the_event_of_a_settle_knows_the_whole_owner(self, execute, memory, events):
        execute(lambda: 42)
        settled = dict(events)["settled"]
        assert settled.record.owner == "t1@host:1"
        # Host and process are not kept: docs/reference.md says why.
        assert memory.get(IDENTITY).owner == "t1"


class TestPoison:
    def crash(self, memory: MemoryStore, times: int) -> None:
        for _ in range(times):
            memory.interrupt(IDENTITY, token=claim(memory).token)

    def test_as_many_crashes_as_allowed_still_run(self, execute, memory):
        self.crash(memory, 3)
        assert execute(lambda: "ran") == Ran("ran")

    def test_one_more_fails_it_without_a_run(self, execute, memory, events, caplog):
        self.crash(memory, 4)
        answer = execute(never)
        assert isinstance(answer, Replay)
        assert answer.record.state is State.FAILED
        assert text_of(answer.record).startswith(b"TooManyCrashes(")
        assert names(events) == ["settled", "replayed"]
        assert "4 runs of shop.charge key order-17 ended in a crash" in caplog.text

    def test_where_a_person_is_to_look_the_first_crash_is_the_last(self, execute, memory):
        self.crash(memory, 1)
        answer = execute(never, on_stale="fail")
        assert answer.record.state is State.FAILED
        assert text_of(answer.record).startswith(b"ProcessingTimedOut(")

    def test_where_a_person_is_to_look_a_failed_run_is_none_of_their_business(self, execute):
        with pytest.raises(ValueError):
            execute(raising(ValueError()), on_stale="fail")
        assert execute(lambda: 1, on_stale="fail") == Ran(1)

    def test_a_verdict_that_cannot_be_written_lets_the_message_come_back(
        self, execute, memory, store, events, caplog
    ):
        self.crash(memory, 4)
        store.fail("settle", StoreUnavailable)
        assert isinstance(execute(never), StoreFailed)
        assert names(events) == ["store_failed"]
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
        self, execute, memory, clock, events, caplog
    ):
        def body() -> str:
            clock.advance(1001)
            settle(memory, claim(memory, "winner"))
            return "late"

        answer = execute(body, lease_ms=1000)
        assert isinstance(answer, Replay)
        assert text_of(answer.record) == b"'theirs'"
        assert answer.record.task_id == "winner"
        assert names(events) == ["claimed", "lease_lost", "replayed"]
        assert "its result is dropped" in caplog.text

    @pytest.mark.parametrize("error", [SoftTimeLimitExceeded, SystemExit])
    def test_a_lost_lease_is_told_once_whatever_strikes_meanwhile(
        self, execute, memory, clock, events, struck, error
    ):
        def body() -> str:
            clock.advance(1001)
            settle(memory, claim(memory, "winner"))
            return "late"

        struck(signals.lease_lost, error)
        with suppress(SystemExit):
            assert isinstance(execute(body, lease_ms=1000), Replay)
        assert names(events)[:2] == ["claimed", "lease_lost"]
        assert names(events)[2:] == ([] if error is SystemExit else ["replayed"])

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

    def test_a_winner_that_failed_leaves_the_key_and_the_late_result_takes_it(
        self, execute, memory, clock
    ):
        def body() -> str:
            clock.advance(1001)
            memory.release(IDENTITY, token=claim(memory).token)
            return "late"

        assert execute(body, lease_ms=1000) == Ran("late")


class TestStoreFailures:
    def test_before_the_claim_nothing_runs(self, execute, store, events, fake_time):
        store.fail_always("claim", StoreUnavailable)
        answer = execute(never)
        assert isinstance(answer, StoreFailed)
        assert isinstance(answer.error, StoreUnavailable)
        assert names(events) == ["store_failed"]
        assert events[0][1].error is answer.error
        assert 1 < fake_time.now - fake_time.START <= claiming.CLAIM_RETRY_SECONDS
        assert len(store.calls) > 3

    def test_a_claim_whose_answer_was_lost_does_not_meet_itself(
        self, execute, store, memory, fake_time
    ):
        store.fail("claim", StoreUnavailable, when="after")
        assert execute(lambda: current_claim().crashes) == Ran(0)
        assert memory.get(IDENTITY).attempts == 1

    def test_a_settle_is_repeated_for_at_least_a_lease(
        self, execute, store, memory, events, fake_time, caplog
    ):
        store.fail_always("settle", StoreUnavailable)
        assert execute(lambda: 1, lease_ms=20_000) == Ran(1)
        assert 15 <= fake_time.now - fake_time.START <= 25
        assert names(events) == ["claimed", "settle_failed"]
        assert isinstance(events[-1][1].error, StoreUnavailable)
        assert [r.levelno for r in caplog.records] == [logging.CRITICAL]
        assert memory.get(IDENTITY).state is State.PROCESSING
        assert not lease.heartbeat._due

    @pytest.mark.parametrize("error", [SoftTimeLimitExceeded, SystemExit])
    def test_a_settle_that_failed_is_told_once_whatever_strikes_meanwhile(
        self, execute, store, events, fake_time, struck, error
    ):
        store.fail_always("settle", StoreUnavailable)
        struck(signals.settle_failed, error)
        with suppress(SystemExit):
            assert execute(lambda: 1) == Ran(1)
        assert names(events) == ["claimed", "settle_failed"]
        calls = len(store.calls)
        assert fake_time.now - fake_time.START <= 61, "and nothing is tried again"
        assert store.calls.count("settle") == calls - 1

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_soft_limit_during_the_settle_does_not_end_it(
        self, execute, store, memory, fake_time, when
    ):
        store.fail("settle", SoftTimeLimitExceeded, when=when)
        assert execute(lambda: 1) == Ran(1)
        assert memory.get(IDENTITY).state is State.COMPLETED

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_exit_during_the_settle_leaves_it_one_more_try(self, execute, store, memory, when):
        store.fail("settle", SystemExit, when=when)
        with pytest.raises(SystemExit):
            execute(lambda: 1)
        assert memory.get(IDENTITY).state is State.COMPLETED
        assert store.calls == ["claim", "settle", "settle"]

    @pytest.mark.parametrize("where", ["a try", "a pause between two", "the codec"])
    def test_an_exit_during_the_settle_leaves_it_one_more_try_even_if_that_fails(
        self, execute, store, events, fake_time, where
    ):
        class Codec(TextCodec):
            errors: ClassVar = [SystemExit()] if where == "the codec" else []

            def dump_value(self, value: Any) -> Stored | None:
                if self.errors:
                    raise self.errors.pop()
                return super().dump_value(value)

        if where == "a try":
            store.fail("settle", SystemExit)
        elif where == "a pause between two":
            fake_time.sleep = lambda _: sys.exit()
        store.fail_always("settle", StoreUnavailable)
        with pytest.raises(SystemExit):
            execute(lambda: 1, codec=Codec())
        tries = 1 if where == "the codec" else 2
        assert store.calls == ["claim", *["settle"] * tries]
        assert names(events) == ["claimed", "settle_failed"]

    def test_an_exit_while_the_store_is_away_leaves_the_key_to_its_lease(
        self, execute, store, memory, fake_time
    ):
        store.fail("settle", StoreUnavailable, SystemExit)
        store.fail_always("settle", StoreUnavailable)
        with pytest.raises(SystemExit):
            execute(lambda: 1)
        assert memory.get(IDENTITY).state is State.PROCESSING
        assert "release" not in store.calls

    def test_a_process_that_is_being_ended_does_not_wait_to_release(
        self, execute, store, fake_time
    ):
        store.fail_always("release", StoreUnavailable)
        with pytest.raises(SystemExit):
            execute(raising(SystemExit(1)))
        assert fake_time.sleeps == []
        assert store.calls == ["claim", "release"]

    def test_an_exit_during_the_release_tries_it_once_more(self, execute, store, memory):
        store.fail("release", SystemExit)
        with pytest.raises(SystemExit):
            execute(raising(ValueError()))
        assert memory.get(IDENTITY) is None


class TestCodecFaults:
    class Broken(TextCodec):
        """Fails so often, then works."""

        def __init__(self, times: int) -> None:
            self.times = times

        def dump_value(self, value: Any) -> Stored | None:
            self.times -= 1
            if self.times >= 0:
                raise RuntimeError("a fault of ours")
            return super().dump_value(value)

        dump_error = dump_value

    def test_a_signal_in_the_codec_costs_no_value(self, execute, memory, fake_time):
        execute(lambda: 42, codec=self.Broken(1))
        assert memory.get(IDENTITY).value.body == b"42"

    def test_a_codec_that_always_fails_does_not_keep_the_record_from_completing(
        self, execute, memory, fake_time
    ):
        assert execute(lambda: 42, codec=self.Broken(10**9)) == Ran(42)
        record = memory.get(IDENTITY)
        assert (record.state, record.value) == (State.COMPLETED, None)
        assert fake_time.now - fake_time.START < 5, "the worker was blocked for a lease"

    def test_an_exception_that_cannot_be_stored_still_fails_the_record(
        self, execute, memory, fake_time
    ):
        with pytest.raises(ValueError):
            execute(raising(ValueError()), codec=self.Broken(10**9), permanent_errors=(ValueError,))
        record = memory.get(IDENTITY)
        assert (record.state, record.value) == (State.FAILED, None)
        assert fake_time.now - fake_time.START < 5, "the worker was blocked for a lease"


# -- signals that strike anywhere --------------------------------------------------------------------------------------


class Strike(Exception):
    """Raised by a "signal handler"; an Exception, as SoftTimeLimitExceeded is."""


class Striker:
    """Raises at the n-th point where the interpreter would run a signal handler.

    CPython looks for signals when it enters a function, after a call and when it jumps back (from 3.11; before, in more
    places still). A trace function that raises is, for the code, the same as a signal handler that raises; and it
    strikes the same point each time.
    """

    _CALLS: ClassVar = {code for name, code in opcode.opmap.items() if name.startswith("CALL")}
    _JUMPS: ClassVar = {
        code for name, code in opcode.opmap.items() if name.startswith("JUMP_BACKWARD")
    }
    _AFTER: ClassVar = _CALLS | _JUMPS | {opcode.opmap.get("JUMP_ABSOLUTE", -1)}

    def __init__(self, at: int, error: BaseException) -> None:
        self.left = at
        self.error = error
        self.struck = ""
        self._last: dict[FrameType, int] = {}

    def run(self, function: Callable[[], Any]) -> Any:
        before = sys.gettrace()
        # In Python 3.12 this has to be known when tracing begins: else most instructions pass unseen.
        sys._getframe().f_trace_opcodes = True
        sys.settrace(self._trace)
        try:
            return function()
        finally:
            sys.settrace(before)
            self._last.clear()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        foreign = "hypothesis" in frame.f_code.co_filename  # it listens to the garbage collector
        if self.struck or foreign or frame.f_code.co_filename == __file__:
            return None
        if event == "call":
            frame.f_trace = self._trace  # Python 3.13 looks for it when the next is set
            frame.f_trace_opcodes = True
            frame.f_trace_lines = False
            self._maybe_strike(frame)
        elif event == "opcode":
            last = self._last.get(frame)
            self._last[frame] = frame.f_code.co_code[frame.f_lasti]
            if last in self._AFTER:
                self._maybe_strike(frame)
        return self._trace

    def _maybe_strike(self, frame: FrameType) -> None:
        self.left -= 1
        if self.left < 0:
            code = frame.f_code
            self.struck = f"{code.co_filename.rpartition('/')[2]}:{frame.f_lineno} {code.co_name}"
            raise self.error


class Hangs(BaseException):
    """Raised in a main thread that waits in vain."""


class Rescue:
    """Frees the main thread from a wait that does not end: ``arm()`` before each round, ``disarm()`` after it."""

    def __init__(self, seconds: float = 1.0) -> None:
        self._seconds = seconds
        self._until = float("inf")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Rescue:
        self._before = signal.signal(signal.SIGUSR2, self._raise)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        signal.signal(signal.SIGUSR2, self._before)

    def arm(self) -> None:
        self._until = time.monotonic() + self._seconds

    def disarm(self) -> None:
        self._until = float("inf")

    def _raise(self, *_: object) -> None:
        if self._until != float("inf"):
            self.arm()  # what comes after may wait as well
            raise Hangs

    def _watch(self) -> None:
        while not self._over.wait(0.05):
            if time.monotonic() > self._until:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR2)


def start(heartbeat: lease.Heartbeat) -> None:
    """Have the thread started, as the first claim of a process does."""
    store = MemoryStore()
    record = claim(store)
    answered = AnsweredAttempt(Claimed(record), time.monotonic(), store)
    other = Claiming(Policy(), TextCodec(), lambda: store).make_claim(a_call(), record, answered)  # type: ignore[arg-type]
    heartbeat.add(other)
    heartbeat.remove(other)


@dataclass(frozen=True, kw_only=True)
class End:
    """What came of a run that a signal struck ``at`` some place."""

    at: str
    ran: bool
    state: State | None
    raised: BaseException | None
    result: object
    renewed: bool
    current: bool

    def __str__(self) -> str:
        ran = "ran" if self.ran else "did not run"
        return f"{self.at}: {ran}, is {self.state}, gave {self.raised or self.result!r}"


def strike_everywhere(error: type[BaseException]) -> Iterator[End]:
    """Run one body once for every place at which a signal can strike."""
    with pytest.MonkeyPatch.context() as monkeypatch, Rescue() as rescue:
        for module in (runner, claiming, endings, backoff):
            monkeypatch.setattr(module, "time", FakeTime())
        heartbeat = None
        at = 0
        while True:
            if heartbeat is None:
                heartbeat = lease.Heartbeat()
                monkeypatch.setattr(runner, "heartbeat", heartbeat)
                start(heartbeat)
            store = MemoryStore()
            effects: list[int] = []
            striker = Striker(at, error())
            # A body without a bytecode of its own: the effect and the end of run() are one.
            run = partial(make_runner(store).execute, a_call(), partial(effects.append, 1))
            raised: BaseException | None = None
            result = None
            rescue.arm()
            try:
                result = striker.run(run)
                with heartbeat._lock:  # whoever comes next needs it
                    pass
            except BaseException as caught:  # noqa: BLE001  signals, and what they break
                raised = caught.with_traceback(None)  # its frames hold the claim
                raised.__context__ = None
            rescue.disarm()
            if not striker.struck:
                assert at > 100, "the striker does not strike"
                return
            record = store.get(IDENTITY)
            yield End(
                at=striker.struck,
                ran=bool(effects),
                state=record.state if record else None,
                raised=raised,
                result=result,
                renewed=any(known() is not None for known in heartbeat._due),
                current=current_claim() is not None,
            )
            claim_module.claim_var.set(None)
            heartbeat._due.clear()
            if isinstance(raised, Hangs):
                heartbeat = None
            at += 1


@pytest.fixture(scope="module")
def soft() -> list[End]:
    return list(strike_everywhere(Strike))


@pytest.fixture(scope="module")
def hard() -> list[End]:
    return list(strike_everywhere(SystemExit))


class TestStrikes:
    def expect(self, ends: list[End], right: Callable[[End], bool]) -> None:
        wrong = [str(end) for end in ends if not right(end)]
        assert not wrong, "\n".join(wrong)

    def test_the_places_lie_before_and_after_the_run(self, soft):
        assert sum(not end.ran for end in soft) > 30
        assert sum(end.ran for end in soft) > 30

    def test_a_soft_limit_that_strikes_after_the_run_leaves_it_completed(self, soft):
        self.expect(soft, lambda end: not end.ran or end.state is State.COMPLETED)

    def test_an_exit_that_strikes_after_the_run_never_releases_it(self, hard):
        self.expect(
            hard, lambda end: not end.ran or end.state in (State.COMPLETED, State.PROCESSING)
        )

    def test_what_strikes_before_the_run_completes_nothing(self, soft, hard):
        self.expect(soft + hard, lambda end: end.ran or end.state in (None, State.PROCESSING))

    def test_a_soft_limit_is_raised_or_the_value_returned(self, soft):
        self.expect(soft, lambda end: end.result == Ran(None) or isinstance(end.raised, Strike))

    def test_an_exit_is_never_swallowed(self, hard):
        self.expect(hard, lambda end: isinstance(end.raised, SystemExit))

    def test_no_strike_makes_the_next_run_wait_for_ever(self, soft, hard):
        self.expect(soft + hard, lambda end: not isinstance(end.raised, Hangs))

    def test_no_strike_leaves_a_claim_to_be_renewed_for_ever(self, soft, hard):
        # One that is settled or released is dropped at its next renewal.
        self.expect(soft + hard, lambda end: not (end.renewed and end.state is State.PROCESSING))

    def test_no_strike_leaves_the_claim_behind_as_the_current_one(self, soft):
        self.expect(soft, lambda end: not end.current)


# An outcome that somebody asks for ------------------------------------------------------------------------------------


def test_a_final_failure_is_kept_for_who_asks_for_it(clock: FakeClock, memory: MemoryStore) -> None:
    asked = replace(a_call(), keep_failure=True, control=(Retry,))
    made = make_runner(memory)

    def body() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        made.execute(asked, body)
    record = memory.get(IDENTITY)
    assert record is not None
    assert (record.state, record.value) == (State.FAILED, TextCodec().dump_error(ValueError("no")))
    assert isinstance(made.execute(asked, body), Replay)


def test_what_is_no_failure_gives_the_key_back_as_ever(
    clock: FakeClock, memory: MemoryStore
) -> None:
    asked = replace(a_call(), keep_failure=True, control=(Retry,))
    # Nor if all errors are permanent: what says that it runs again is none.
    made = make_runner(memory, permanent_errors=(Exception,))

    def body() -> None:
        raise Retry

    with pytest.raises(Retry):
        made.execute(asked, body)
    assert memory.get(IDENTITY) is None


def test_a_failure_after_a_step_keeps_the_step_and_is_no_end(
    clock: FakeClock, memory: MemoryStore
) -> None:
    class Steps(TextCodec):
        def dump_step(self, name: str, value: object) -> Stored:
            return Stored(content_type="x", content_encoding="utf-8", body=str(value).encode())

        def load_value(self, stored: Stored) -> object:
            return stored.body.decode()

    asked = replace(a_call(), keep_failure=True)
    made = make_runner(memory, codec=Steps())
    charged = []

    def body() -> None:
        current_claim().step("charge", lambda: charged.append(1))
        raise ValueError

    for _ in range(2):
        with pytest.raises(ValueError):
            made.execute(asked, body)
        record = memory.get(IDENTITY)
        assert record is not None
        assert record.state is State.INTERRUPTED
    assert charged == [1]
