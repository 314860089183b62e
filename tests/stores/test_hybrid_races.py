"""Whatever the cache loses or does late, and however calls overlap: it says only what is true.

A hypothesis machine runs calls of a hybrid store each in a thread of its own, stopped before every single question to
the cache or the store behind it, so that it decides how they overlap. What the cache says, at any moment, must be what
that store says, unless a forget of this very key is not over yet.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

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

pytest.importorskip("django")

from celery_idempotent.django.hybrid import Cache
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    Reserved,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.redis.format import Keyspace
from celery_idempotent.stores.table import Snapshot
from celery_idempotent.testing import FakeClock
from tests.stores.hybrids import BadLink, MemoryHybrid
from tests.support.tiers import examples, run_until_seen

pytestmark = pytest.mark.redis
T = TypeVar("T")

_names = Keyspace("x")
_all = (Identity(namespace="charge", key=f"{n}") for n in itertools.count())
#: Two in one bucket, and one in another.
_first, _second = itertools.islice((i for i in _all if b"{17}" in _names.of_record(i)[0]), 2)
IDENTITIES = [_first, _second, Identity(namespace="charge", key="elsewhere")]
MINUTE = 60_000

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


class WatchedStore(MemoryHybrid):
    """Stops a call before it asks the memory, or the cache."""

    def __init__(self, machine: Races, cache: Any, clock: Callable[[], int]) -> None:
        super().__init__(cache, clock)
        self.machine = machine
        for verb in ("look", "ticket", "fill", "bury"):
            setattr(cache, verb, self._watched(verb, getattr(cache, verb)))

    def _at(self, identity: Identity, verb: Callable[[Snapshot], T]) -> T:
        call = getattr(Call.current, "call", None)
        if call is not None:  # not the machine itself
            call.stop()
            if call.name == "forget":
                self.machine.half_forgotten.add(identity)
        return super()._at(identity, verb)

    def _watched(self, verb: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def ask(*args: Any, **kwargs: Any) -> Any:
            Call.current.call.stop()
            answer = method(*args, **kwargs)
            self.machine.of_cache(verb, args[0], answer)
            return answer

        return ask


class Races(RuleBasedStateMachine):
    client: redis.Redis
    url: str
    prefix: str
    numbers = itertools.count()
    #: What happened, and how often: a machine that never gets anywhere proves nothing.
    seen: Counter[str]

    @initialize()
    def open(self) -> None:
        prefix = f"{self.prefix}-{next(self.numbers)}"
        self.clock = FakeClock()
        self.cache: Any = Cache(self.url, prefix=prefix, options={"socket_timeout": 5})
        self.spy: Any = Cache(self.url, prefix=prefix, options={"socket_timeout": 5})
        self.match = f"{self.cache.prefix}:*"
        self.bad = BadLink(self.cache._link)
        self.cache._link = self.bad  # type: ignore[assignment]
        self.store = WatchedStore(self, self.cache, self.clock)
        self.records: dict[Identity, list[Record]] = {name: [] for name in IDENTITIES}
        self.calls: list[Call] = []
        #: Their records may be deleted, and nobody promised yet that the cache knows.
        self.half_forgotten: set[Identity] = set()

    # What the calls ask.

    def of_cache(self, verb: str, identity: Identity, answer: Any) -> None:
        self.seen[f"{verb} {type(answer).__name__}"] += 1
        if verb == "look" and answer is not None:
            self.agrees(identity, answer.record)

    def agrees(self, identity: Identity, cached: Record) -> None:
        """Is what the cache says what the store says? It may not know that callbacks were sent."""
        # Without a stop: it is compared as of now.
        look = MemoryHybrid._at(self.store, identity, lambda look: look)
        found = look.stored and look.stored.record
        if found is not None and cached in (found, replace(found, delivered=False)):
            return
        # Nothing was promised yet to whoever is forgetting it.
        assert identity in self.half_forgotten, (cached, found)
        self.seen["half forgotten"] += 1

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
            if call.name == "forget":
                forgetting = [each for each in self.calls if each.name == "forget"]
                if call.identity not in [each.identity for each in forgetting]:
                    self.half_forgotten.discard(call.identity)
            if call.error is not None:
                assert call.name == "forget", call.error
                assert isinstance(call.error, StoreUnavailable), call.error
                self.seen["forget failed"] += 1
                continue
            self.seen[f"{call.name} {type(call.answer).__name__}"] += 1
            if isinstance(call.answer, (Claimed, Reserved)):
                self.records[call.identity].append(call.answer.record)

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
        found = self.store.get(identity)
        if anyway or (found is not None and found.state.settled):
            self.begin(at_once, "forget", identity, identity)

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
        self.cache.away_until = 0.0

    @rule(flush=st.sampled_from([True, False, False]))
    def lose(self, flush: bool) -> None:
        names = self.names() if flush else []
        if names:
            self.client.delete(*names)
            self.seen["flushed"] += 1

    def names(self) -> list[Any]:
        return list(self.client.scan_iter(match=self.match, count=1000))

    @invariant()
    def the_cache_says_only_what_is_true(self) -> None:
        if not hasattr(self, "spy"):
            return
        for identity in IDENTITIES:
            found = self.spy.look(identity)
            if found is not None:
                self.seen["cached"] += 1
                self.agrees(identity, found.record)

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.change("well")
        for call in self.calls:
            call.finish()
        self.collect()
        assert not self.half_forgotten
        self.the_cache_says_only_what_is_true()
        self.cache.close()
        self.spy.close()


@pytest.fixture
def fixed(redis_url: str, redis_client: redis.Redis, prefix: str) -> dict[str, Any]:
    return {"url": redis_url, "client": redis_client, "prefix": prefix, "seen": Counter()}


def test_whatever_the_cache_loses_and_however_calls_overlap_it_says_only_what_is_true(fixed):
    machine = type("Races", (Races,), fixed)
    wanted = ("claim Settled", "look Settled", "forget bool", "flushed", "late")
    run_until_seen(machine, wanted, machine.seen, tries=examples(25, 80), steps=50)
