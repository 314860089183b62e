"""Whatever the cache loses, brings back or does late, and however calls overlap: HybridStore answers as a plain store.

A hypothesis machine runs calls of a HybridStore each in a thread of its own, stopped before every
single question to the cache or the truth, so that it decides how they overlap. A plain MemoryStore
gets each call at the moment at which the hybrid's counts, and must have answered the same.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    Reserved,
    ReserveRequest,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.hybrid.breaker import Breaker
from celery_idempotent.stores.hybrid.cache import Cached, RedisCache
from celery_idempotent.stores.hybrid.store import HybridStore
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.keyspace import Keyspace
from celery_idempotent.testing import FakeClock
from tests.stores.hybrids import BadLink, DatedLink, public
from tests.stores.shifted import FixedLink
from tests.support.tiers import examples, run_until_seen

pytestmark = pytest.mark.redis

_names = Keyspace("x")
_all = (Identity(namespace="charge", key=f"{n}") for n in itertools.count())
#: Two in one bucket, which share a generation, and one in another.
_first, _second = itertools.islice((i for i in _all if _names.locate(i)[0] == 17), 2)
IDENTITIES = [_first, _second, Identity(namespace="charge", key="elsewhere")]
MINUTE = 60_000
#: The cache's clock is not the truth's.
OFFSET_US = 421_000_000

identities = st.sampled_from([*IDENTITIES, *[_first] * 4])
fingerprints = st.sampled_from([None, bytes(16), bytes(16), b"another........."])
task_ids = st.sampled_from(["a", "b", ""])
values = st.none() | st.builds(
    Stored,
    content_type=st.just("application/json"),
    content_encoding=st.just("utf-8"),
    body=st.sampled_from([b"0", b"1"]),
)
mostly = st.sampled_from([True, True, False])
ages = st.sampled_from([0, 0, 0, 1])


class Call:
    """A call in a thread of its own, which takes one step at a time."""

    current = threading.local()

    def __init__(self, name: str, identity: Identity, do: Callable[[], Any]) -> None:
        self.name, self.identity = name, identity
        self.done = False
        self.answer: Any = None
        self.error: BaseException | None = None
        #: What the plain store answered when this call counted.
        self.expected: Any = None
        self._do = do
        self._go, self._stopped = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._stopped.acquire()

    def stop(self) -> None:
        """Wait to be told to go on; called by what the call asks."""
        self._stopped.release()
        self._go.acquire()

    def step(self) -> None:
        if not self.done:
            self._go.release()
            assert self._stopped.acquire(timeout=30)

    def finish(self) -> None:
        while not self.done:
            self.step()

    def _run(self) -> None:
        Call.current.call = self
        try:
            self.stop()
            self.answer = self._do()
        except BaseException as error:  # noqa: BLE001  the machine looks at it
            self.error = error
        self.done = True
        self._stopped.release()


class Watched:
    """Stops the call before each question, and tells the machine of each answer."""

    def __init__(self, asked: Any, tell: Callable[..., None], *unwatched: str) -> None:
        self._asked, self._tell = asked, tell
        for verb in public(asked):
            method = getattr(asked, verb)
            setattr(self, verb, method if verb in unwatched else self._watched(verb, method))

    def __getattr__(self, flag: str) -> Any:
        return getattr(self._asked, flag)

    def _watched(self, verb: str, method: Callable[..., Any]) -> Any:

        def ask(*args: Any, **kwargs: Any) -> Any:
            call = Call.current.call
            call.stop()
            answer = method(*args, **kwargs)
            self._tell(call, verb, answer, args, kwargs)
            return answer

        return ask


class Races(RuleBasedStateMachine):
    client: redis.Redis
    url: str
    prefix: str
    numbers = itertools.count()
    #: May the cache's data be lost or brought back by others than the store?
    chaos = True
    #: What happened, and how often: a machine that never gets anywhere proves nothing.
    seen: Counter[str]

    @initialize()
    def open(self) -> None:
        prefix = f"{self.prefix}-{next(self.numbers)}"
        self.clock = FakeClock()
        self.plain: Any = MemoryStore(self.clock)
        self.raw: Any = MemoryStore(self.clock)
        cache: Any = RedisCache(self.url, prefix=prefix, options={"socket_timeout": 5})
        self.match = f"{cache.prefix}:*"
        self.bad: Any = BadLink(cache._link)
        self.dated: Any = DatedLink(self.bad)
        self.link = FixedLink(self.dated, self.client, f"{prefix}-clock")
        self.link.set(self.clock() + OFFSET_US)
        self.spy: Any = RedisCache(self.url, prefix=prefix, options={"socket_timeout": 5})
        self.spy_dated: Any = DatedLink(self.spy._link)
        self.spy._link = FixedLink(self.spy_dated, self.client, f"{prefix}-clock")
        cache._link = self.link
        cache.breaker = Breaker(lambda: self.clock() / 1e6)
        self.cache = cache
        self.store: Any = HybridStore(
            Watched(cache, self.of_cache),  # type: ignore[arg-type]
            Watched(self.raw, self.of_truth, "joined"),  # type: ignore[arg-type]
        )
        self.records: dict[Identity, list[Record]] = {name: [] for name in IDENTITIES}
        self.calls: list[Call] = []
        #: Their records were deleted, and nobody promised yet that the cache knows.
        self.half_forgotten: set[Identity] = set()
        self.snapshots: list[dict[bytes, tuple[bytes, int]]] = []

    # What the calls ask.

    def of_cache(self, call: Call, verb: str, answer: Any, args: Any, kwargs: Any) -> None:
        self.seen[f"{verb} {type(answer).__name__}"] += 1
        if verb == "look" and isinstance(answer, Cached):
            found = self.plain.get(call.identity)
            if self.agrees(call.identity, answer.record, found):
                now = self.clock() // 1000
                call.expected = Settled(answer.record, age_ms=now - found.updated_ms)
            else:
                call.expected = None
        if verb == "lift":
            self.half_forgotten.discard(call.identity)

    def of_truth(self, call: Call, verb: str, answer: Any, args: Any, kwargs: Any) -> None:
        if verb == "retained":
            return
        call.expected = getattr(self.plain, verb)(*args, **kwargs)
        assert answer == call.expected, (verb, args, kwargs)
        if verb == "forget":
            self.half_forgotten.add(call.identity)

    def agrees(self, identity: Identity, cached: Record, found: Record | None) -> bool:
        """Is what the cache says what the truth says? It may not know that callbacks were sent."""
        if found is not None and cached in (found, replace(found, delivered=False)):
            return True
        # Nothing was promised yet to whoever is forgetting it, or was told to repeat that.
        assert self.chaos, (cached, found)
        assert identity in self.half_forgotten, (cached, found)
        self.seen["half forgotten"] += 1
        return False

    # Calls.

    def begin(self, at_once: bool, name: str, identity: Identity, *args: Any, **asked: Any) -> None:
        method = getattr(self.store, name)
        call = Call(name, identity, lambda: method(*args, **asked))
        self.calls.append(call)
        if len(self.calls) > 3:
            # More would keep each other from getting anywhere.
            self.calls[0].finish()
            self.collect()
        if at_once:
            call.finish()
            self.collect()

    def collect(self) -> None:
        for call in [call for call in self.calls if call.done]:
            self.calls.remove(call)
            if call.error is not None:
                assert call.name == "forget", call.error
                assert isinstance(call.error, StoreUnavailable), call.error
                self.seen["forget failed"] += 1
                continue
            answer = call.answer
            self.seen[f"{call.name} {type(answer).__name__}"] += 1
            if call.expected is not None:
                assert type(answer) is type(call.expected)
                if isinstance(answer, Settled):
                    assert answer.record == call.expected.record
                    # Too young by as long as the reading took, which other calls may draw out here.
                    assert 0 <= answer.age_ms <= call.expected.age_ms + 1
                else:
                    assert answer == call.expected
            else:
                assert call.identity in self.half_forgotten or self.chaos
            if isinstance(answer, (Claimed, Reserved)):
                self.records[call.identity].append(answer.record)

    def record(self, identity: Identity, age: int) -> Record | None:
        records = self.records[identity]
        return records[max(len(records) - 1 - age, 0)] if records else None

    @rule(
        at_once=st.booleans(),
        identity=identities,
        attempt=st.sampled_from([b"attempt1", b"attempt2"]),
        fingerprint=fingerprints,
        task_id=task_ids,
    )
    def claim(self, at_once: bool, identity: Identity, **asked: Any) -> None:
        asked = {**asked, "lease_ms": MINUTE, "keep_ms": 2 * MINUTE}
        self.begin(at_once, "claim", identity, ClaimRequest(identity=identity, **asked))

    @rule(at_once=st.booleans(), identity=identities, fingerprint=fingerprints, task_id=task_ids)
    def reserve(self, at_once: bool, identity: Identity, **asked: Any) -> None:
        asked = {**asked, "deadline_ms": MINUTE, "keep_ms": 2 * MINUTE}
        self.begin(at_once, "reserve", identity, ReserveRequest(identity=identity, **asked))

    @rule(
        at_once=st.booleans(),
        identity=identities,
        age=ages,
        state=st.sampled_from([State.COMPLETED, State.COMPLETED, State.FAILED]),
        value=values,
        keep_ms=st.sampled_from([MINUTE, 10 * MINUTE, 10 * MINUTE]),
        replaced=st.booleans(),
    )
    def settle(self, at_once: bool, identity: Identity, age: int, **asked: Any) -> None:
        record = self.record(identity, age)
        if record is not None:
            self.begin(at_once, "settle", identity, SettleRequest(record=record, **asked))

    @rule(at_once=mostly, identity=identities, value=values)
    def complete(self, at_once: bool, identity: Identity, value: Stored | None) -> None:
        """Do what a task does."""
        asked: dict[str, Any] = {"attempt": b"attempt3", "lease_ms": MINUTE, "keep_ms": 2 * MINUTE}
        self.begin(True, "claim", identity, ClaimRequest(identity=identity, task_id="c", **asked))
        record = self.record(identity, 0)
        if record is not None:
            ended: Any = {"state": State.COMPLETED, "value": value, "keep_ms": 10 * MINUTE}
            self.begin(at_once, "settle", identity, SettleRequest(record=record, **ended))

    @rule(at_once=mostly, identity=identities, anyway=st.sampled_from([True, *[False] * 5]))
    def forget(self, at_once: bool, identity: Identity, anyway: bool) -> None:
        found = self.plain.get(identity)
        if anyway or (found is not None and found.state.settled):
            self.begin(at_once, "forget", identity, identity)

    @rule(at_once=st.sampled_from([True, False, False]), identity=identities)
    def duplicate(self, at_once: bool, identity: Identity) -> None:
        """Ask for a key that is settled, where the cache has lost it."""
        found = self.plain.get(identity)
        if found is not None and found.state.settled:
            self.evict(identity)
            asked: dict[str, Any] = {
                "attempt": b"attempt4",
                "lease_ms": MINUTE,
                "keep_ms": 2 * MINUTE,
            }
            self.begin(
                at_once, "claim", identity, ClaimRequest(identity=identity, task_id="d", **asked)
            )

    @rule(
        at_once=st.booleans(),
        identity=identities,
        age=ages,
        verb=st.sampled_from(["mark_delivered", "mark_delivered", "release"]),
    )
    def end(self, at_once: bool, identity: Identity, age: int, verb: str) -> None:
        record = self.record(identity, age)
        if record is not None:
            self.begin(at_once, verb, identity, identity, token=record.token)

    @precondition(lambda self: self.calls)
    @rule(which=st.integers(0, 5), steps=st.integers(1, 3))
    def go_on(self, which: int, steps: int) -> None:
        call = self.calls[which % len(self.calls)]
        for _ in range(steps):
            call.step()
        self.collect()

    # The world.

    @rule(ms=st.sampled_from([3, 3_000, 3_000, MINUTE]))
    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.link.set(self.clock() + OFFSET_US)
        for name in self.names():
            left = self.client.pttl(name)
            if 0 <= left <= ms:
                self.client.delete(name)
            elif left > ms:
                self.client.pexpire(name, left - ms)

    @rule(mode=st.sampled_from([*["well"] * 8, "away", "frozen", "frozen", "deaf"]))
    def change(self, mode: str) -> None:
        """The server goes away, freezes, or its answers are lost; what was sent may be done now."""
        if mode == "well":
            self.seen["late"] += len(self.bad.late)
            self.bad.thaw()
        self.bad.mode = mode

    @rule(flush=st.sampled_from([True, False, False]))
    def lose(self, flush: bool) -> None:
        if self.chaos and flush:
            self.wipe()
            self.seen["flushed"] += 1

    @rule()
    def save(self) -> None:
        """A replica stops listening here."""
        found: dict[bytes, Any] = {}
        for name in self.names():
            left = self.client.pttl(name)
            ends = self.clock() // 1000 + left if left >= 0 else -1
            found[name] = (self.client.get(name), ends)
        self.snapshots.append(found)

    @rule(which=st.integers(-3, 0), really=mostly)
    def fail_over(self, which: int, really: bool) -> None:
        """A replica that may have stopped listening long ago, or is empty, becomes the master."""
        if not self.chaos or not really:
            return
        # One of the last three, or nothing.
        snapshot = self.snapshots[which] if -len(self.snapshots) <= which < 0 else {}
        self.wipe()
        now = self.clock() // 1000
        for name, (content, ends) in snapshot.items():
            if ends < 0 or ends > now:
                self.client.set(name, content, px=None if ends < 0 else ends - now)
        self.dated.history += 1
        self.spy_dated.history = self.dated.history
        # What the old one had not read yet, it never will.
        self.bad.late.clear()
        self.seen["failed over to old data" if snapshot else "failed over to nothing"] += 1

    def evict(self, identity: Identity) -> None:
        name = self.cache._keys.locate(identity)[1]
        entry: Any = self.client.get(name)
        if entry is not None and entry.startswith(b"S"):
            self.client.delete(name)

    def names(self) -> list[Any]:
        return list(self.client.scan_iter(match=self.match, count=1000))

    def wipe(self) -> None:
        if names := self.names():
            self.client.delete(*names)

    @invariant()
    def the_cache_says_only_what_is_true(self) -> None:
        if not hasattr(self, "spy"):
            return
        for identity in IDENTITIES:
            found = self.spy.look(identity)
            if isinstance(found, Cached):
                self.seen["cached"] += 1
                self.agrees(identity, found.record, self.plain.get(identity))
            assert self.raw.get(identity) == self.plain.get(identity)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.bad.mode = "well"
        for call in self.calls:
            call.finish()
        self.collect()
        # Well again, a forget that was told to be repeated makes all certain.
        self.cache.breaker.succeeded()
        for identity in sorted(self.half_forgotten, key=str):
            self.begin(True, "forget", identity, identity)
        assert not self.half_forgotten
        self.the_cache_says_only_what_is_true()
        self.cache.close()
        self.spy.close()


def run(machine: type[Races], *wanted: str) -> None:
    """Run it until all that is ``wanted`` happened."""
    run_until_seen(machine, wanted, machine.seen, tries=examples(15, 40), steps=50)


@pytest.fixture
def fixed(redis_url: str, redis_client: redis.Redis, prefix: str) -> dict[str, Any]:
    return {"url": redis_url, "client": redis_client, "prefix": prefix, "seen": Counter()}


def test_whatever_the_cache_loses_or_brings_back_it_answers_as_a_plain_store(fixed):
    machine = type("Races", (Races,), fixed)
    run(machine, "claim Settled", "look Cached", "forget bool", "flushed")


def test_however_calls_overlap_it_answers_as_a_plain_store(fixed):
    machine = type("Races", (Races,), {**fixed, "chaos": False})
    run(machine, "claim Settled", "look Cached", "forget bool")
    assert fixed["seen"]["half forgotten"] == 0


def overlaps(first: int, second: int) -> list[tuple[int, ...]]:
    """Return every order of so many steps of one call and so many of another: 0 or 1 for each step."""
    both = range(first + second)
    return [
        tuple(int(n not in of_first) for n in both)
        for of_first in itertools.combinations(both, first)
    ]


@pytest.mark.parametrize(
    "reader", ["duplicate", "settle", pytest.param("mark_delivered", marks=pytest.mark.wide)]
)
@pytest.mark.parametrize("event", ["nothing", "flush", "old data", "late answers"])
def test_in_no_order_of_their_steps_does_a_fill_undo_a_forget(fixed, reader, event):
    # Where no data are lost, the cache is right at every moment, not only once a forget has succeeded.
    chaos = event in ("flush", "old data")
    machine = type("Races", (Races,), {**fixed, "chaos": chaos})()
    machine.open()
    try:
        for number, order in enumerate(overlaps(4, 4)):
            # Something else every time, so that it comes at every step of every call.
            moment = number % len(order) if event != "nothing" else None
            machine.complete(at_once=reader != "settle", identity=_first, value=None)
            machine.save()
            if reader == "duplicate":
                machine.duplicate(at_once=False, identity=_first)
            elif reader == "mark_delivered":
                machine.end(at_once=False, identity=_first, age=0, verb=reader)
            machine.forget(at_once=False, identity=_first, anyway=True)
            calls = list(machine.calls)
            assert len(calls) == 2
            for n, which in enumerate(order):
                if n == moment and event == "flush":
                    machine.lose(flush=True)
                elif n == moment and event == "old data":
                    machine.fail_over(which=-1, really=True)
                elif n == moment:
                    machine.change("frozen")
                calls[which].step()
                machine.the_cache_says_only_what_is_true()
            machine.change("well")
            for call in calls:
                call.finish()
            machine.collect()
            machine.the_cache_says_only_what_is_true()
            if event == "old data":
                # The replica had not heard of the forget, nor has the next.
                machine.fail_over(which=-1, really=True)
            machine.cache.breaker.succeeded()
            machine.claim(
                at_once=True,
                identity=_first,
                attempt=b"%08d" % number,
                fingerprint=None,
                task_id="z",
            )
            machine.forget(at_once=True, identity=_first, anyway=True)
            assert not machine.half_forgotten
            assert machine.plain.get(_first) is None
            machine.the_cache_says_only_what_is_true()
            machine.snapshots.clear()
    finally:
        machine.teardown()
    assert fixed["seen"]["forget bool"] >= 70
