"""MemoryStore and RedisStore answer alike, whatever is asked of them in whatever order."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import redis
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    Renewal,
    Reserved,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
    SweepReport,
)
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.stores.redis.format import LEASES
from celery_idempotent.testing import FakeClock
from tests.stores.shifted import FixedLink, StandingStore
from tests.stores.verbs import in_one_bucket
from tests.support.tiers import examples, run_until_seen

pytestmark = pytest.mark.redis

#: In one bucket, so that both stores give out tokens from one high-water mark.
IDENTITIES = in_one_bucket(3)
#: Redis' own clock goes on, and it decides what expires: hence every life ends half a minute away
#: from any moment that the stopped clock reaches, while leases and deadlines may end right on it.
MINUTE, HALF = 60_000, 30_000

identities = st.sampled_from(IDENTITIES)
minutes = st.sampled_from([MINUTE, 2 * MINUTE])
keeps = st.sampled_from([2 * MINUTE + HALF, 4 * MINUTE + HALF])
fingerprints = st.sampled_from([None, None, bytes(16), bytes(16), b"another........."])
messages = st.sampled_from([None, b"", b"R\0\0\0\1\5", b"message", b"another"])
task_ids = st.sampled_from(["a", "b", "", "6ff5d5ba-6ff1-4b4f-8f0e-4f0f2f1f0f3f"])
notes = st.sampled_from(["", "", "complete by alice", "fail by bob: " + "€" * 150])
values = st.builds(
    Stored,
    content_type=st.sampled_from(["application/json", "text/html"]),
    content_encoding=st.just("utf-8"),
    body=st.sampled_from([b"", b"17", b"S\0\0\0\1x"]),
)
#: Which of the tokens that a key has had, from the last one.
ages = st.sampled_from([0, 0, 0, 0, 1, 2])


class Agreement(RuleBasedStateMachine):
    """Asks both stores the same, at the same time by both their clocks."""

    client: redis.Redis
    url: str
    prefix: str
    numbers = itertools.count()
    #: What was answered, and how often: a machine that never gets anywhere proves nothing.
    seen: Counter[str]

    @initialize()
    def open(self) -> None:
        prefix = f"{self.prefix}-{next(self.numbers)}"
        self.clock = FakeClock()
        self.memory: Any = MemoryStore(self.clock)
        self.redis: Any = StandingStore(self.url, prefix=prefix)
        self.names = {name: self.redis._keys.of_record(name)[0] for name in IDENTITIES}
        self.leases = self.redis._keys.index(LEASES)[17]
        self.link = FixedLink(self.redis._link, self.client, f"{prefix}-clock")
        self.redis._link = self.link  # type: ignore[assignment]
        self.link.set(self.clock())
        self.records: dict[Identity, list[Record]] = {name: [] for name in IDENTITIES}

    def ask(self, verb: str, *args: Any, **kwargs: Any) -> Any:
        ours = getattr(self.memory, verb)(*args, **kwargs)
        theirs = getattr(self.redis, verb)(*args, **kwargs)
        if isinstance(ours, SweepReport):
            ours, theirs = _sorted(ours), _sorted(theirs)
        assert ours == theirs, (verb, args, kwargs)
        self.seen[f"{verb} {ours if isinstance(ours, bool) else type(ours).__name__}"] += 1
        if isinstance(ours, (Claimed, Reserved)):
            self.records[ours.record.identity].append(ours.record)
        return ours

    def token(self, identity: Identity, age: int) -> int:
        return self.record(identity, age).token

    def record(self, identity: Identity, age: int) -> Record:
        records = self.records[identity]
        return records[max(len(records) - 1 - age, 0)]

    @rule(
        identity=identities,
        attempt=st.sampled_from([b"attempt1", b"attempt2"]),
        lease_ms=minutes,
        keep_ms=keeps,
        fingerprint=fingerprints,
        task_id=task_ids,
        on_stale=st.sampled_from(["interrupt", "fail", "requeue", "requeue", "requeue"]),
        message=messages,
    )
    def claim(self, identity: Identity, **asked: Any) -> None:
        self.ask("claim", ClaimRequest(identity=identity, worker="w:1", **asked))

    @rule(
        identity=identities,
        task_id=task_ids,
        deadline_ms=minutes,
        keep_ms=keeps,
        fingerprint=fingerprints,
        message=messages,
        uncommitted=st.booleans(),
    )
    def reserve(self, identity: Identity, **asked: Any) -> None:
        self.ask("reserve", ReserveRequest(identity=identity, **asked))

    @rule(identity=identities, age=ages, lease_ms=minutes, keep_ms=keeps)
    def renew(self, identity: Identity, age: int, **asked: Any) -> None:
        if self.records[identity]:
            self.ask(
                "renew", [Renewal(identity=identity, token=self.token(identity, age), **asked)]
            )

    @rule(
        identity=identities,
        age=ages,
        state=st.sampled_from([State.COMPLETED, State.FAILED]),
        value=st.none() | values,
        keep_ms=keeps,
        replaced=st.booleans(),
        restore=st.sampled_from([True, True, False]),
        note=notes,
        swept=st.booleans(),
        looks=st.booleans(),
    )
    def settle(self, identity: Identity, age: int, *, looks: bool, **asked: Any) -> None:
        if self.records[identity]:
            seen = self.memory.get(identity) if looks else None
            record = seen or self.record(identity, age)
            if asked["note"]:  # an operator did not run it, and is no sweep
                asked |= {"restore": False, "swept": False}
            self.ask("settle", SettleRequest(record=record, **asked))

    @rule(identity=identities, age=ages, name=st.sampled_from(["", "pay", "ship"]), value=values)
    def checkpoint(self, identity: Identity, age: int, **asked: Any) -> None:
        if self.records[identity]:
            self.ask("checkpoint", identity, token=self.token(identity, age), **asked)

    @rule(identity=identities, age=ages, requeue_ms=st.none() | minutes, note=notes)
    def release(self, identity: Identity, age: int, **asked: Any) -> None:
        if self.records[identity]:
            self.ask("release", identity, token=self.token(identity, age), **asked)

    @rule(
        identity=identities,
        age=ages,
        verb=st.sampled_from(["interrupt", "mark_delivered"]),
    )
    def end(self, identity: Identity, age: int, verb: str) -> None:
        if self.records[identity]:
            self.ask(verb, identity, token=self.token(identity, age))

    @rule(identity=identities)
    def crash(self, identity: Identity) -> None:
        found = self.memory.get(identity)
        if found is not None and found.state is State.PROCESSING:
            self.ask("interrupt", identity, token=found.token)

    @rule(identity=identities, age=st.none() | ages, deadline_ms=minutes)
    def requeue(self, identity: Identity, age: int | None, deadline_ms: int) -> None:
        named = age is not None and bool(self.records[identity])
        token = self.token(identity, age or 0) if named else None
        self.ask("requeue", identity, deadline_ms=deadline_ms, token=token)

    @rule(requeue_ms=minutes)
    def sweep(self, requeue_ms: int) -> None:
        self.ask("sweep", limit=100, requeue_ms=requeue_ms)

    @rule(
        identity=identities,
        really=st.sampled_from([True, False, False]),
        state=st.none() | st.sampled_from(State),
    )
    def forget(self, identity: Identity, really: bool, state: State | None) -> None:
        if really:
            self.ask("forget", identity, state=state)

    @rule()
    def prune(self) -> None:
        # Each counts what it has to delete: records, or entries of an index.
        self.memory.prune(limit=100)
        self.redis.prune(limit=100)

    @rule(
        ms=st.sampled_from([0, 3, MINUTE, MINUTE, MINUTE, 2 * MINUTE, 5 * MINUTE]),
        exact=st.booleans(),
    )
    def advance(self, ms: int, exact: bool) -> None:
        if exact:
            # Right to the first deadline that is to come.
            found = [self.memory.get(name) for name in IDENTITIES]
            now = self.clock() // 1000
            to_come = [r.deadline_ms - now for r in found if r and r.deadline_ms]
            ms = min((left for left in to_come if left > 0), default=ms)
        self.clock.advance(ms)
        self.link.set(self.clock())
        for name in self.names.values():
            left = self.client.pttl(name)
            if 0 <= left <= ms:
                self.client.delete(name)
            elif left > ms:
                self.client.pexpire(name, left - ms)

    @invariant()
    def same_records(self) -> None:
        now = self.clock() // 1000
        entries: Any = self.client.zrange(self.leases, 0, -1, withscores=True)
        scores = dict(entries)
        for identity, name in self.names.items():
            record = self.ask("get", identity)
            if record is None:
                continue
            self.seen[record.state.name] += 1
            left, score = self.client.pttl(name), scores.get(name)
            assert left > 0
            if record.deadline_ms is None:
                assert score is None
                continue
            assert left > record.deadline_ms - now
            if score is None:
                # A sweep left it to the next reservation.
                assert (record.state, record.message) == (State.QUEUED, None)
                assert record.deadline_ms <= now
            else:
                assert score == record.deadline_ms

    def teardown(self) -> None:
        if hasattr(self, "redis"):
            self.redis.close()


def _sorted(report: SweepReport) -> tuple[list[Record], list[Record], bool]:
    def by_key(records: tuple[Record, ...]) -> list[Record]:
        return sorted(records, key=lambda record: record.identity.key)

    return by_key(report.interrupted), by_key(report.requeued), report.more


def test_both_stores_answer_alike(redis_url: str, redis_client: redis.Redis, prefix: str):
    seen: Counter[str] = Counter()
    fixed = {"url": redis_url, "client": redis_client, "prefix": prefix, "seen": seen}
    machine = type("Agreement", (Agreement,), fixed)
    answers = {"claim Claimed", "claim Held", "claim Mismatched", "reserve Reserved"}
    wanted = answers | {state.name for state in State}
    run_until_seen(machine, wanted, seen, tries=examples(20, 60))
