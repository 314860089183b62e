"""Records in Redis or Valkey: three scripts are the fast paths of a run, the table decides all else in Python."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    Counted,
    Identity,
    Page,
    Record,
    Renewal,
    ResultWrite,
    Selection,
    SettledWith,
    SettleRequest,
    State,
    Stats,
    SweepReport,
)
from celery_idempotent.stores.base import (
    COUNTED_HOURS,
    HOUR_MS,
    ServerFacts,
    Store,
    Taken,
    report,
)
from celery_idempotent.stores.deciding import (
    Asked,
    Look,
    StoredRecord,
    asked_to_settle,
    brought,
)
from celery_idempotent.stores.redis.browse import Search
from celery_idempotent.stores.redis.format import (
    BUCKETS,
    FAILURES,
    HEAD,
    INTERRUPTED,
    LEASES,
    STARTS,
    Keyspace,
    pack,
    pack_own,
    pack_tail,
    unpack,
)
from celery_idempotent.stores.redis.servers import (
    SCRIPTS,
    Command,
    Reply,
    Server,
    exchange,
    facts_of,
    in_steps,
    is_one_database,
    pairs,
    plain,
)
from celery_idempotent.stores.redis.urls import link_and_prefix
from celery_idempotent.stores.table import OUTCOME, PROCESSING, Verb

if TYPE_CHECKING:
    from redis import ConnectionPool

logger = logging.getLogger(__name__)

T = TypeVar("T")
#: Runs the script swap with these arguments, or plans to; returns its answer.
Swap: TypeAlias = Callable[[Identity, tuple[bytes, ...]], Reply]

#: The token and the time that a new record got.
_STAMP = Struct(">QQ")
#: The state of a record that each verb makes where there is none, and the attempts to run it.
_NEW: dict[Verb, tuple[State, int]] = {
    "claim": (State.PROCESSING, 1),
    "reserve": (State.QUEUED, 0),
}
#: Members of an Enum take Python 3.11 0.2 µs to look up.
_SETTLED = {b"stored": SettledWith.RESULT, b"settled": SettledWith.NOTHING}
_FAILED, _LOST = State.FAILED, SettledWith.LOST
#: What a settle carries over, but for what its script copies.
_CARRIED = tuple(
    name for name in OUTCOME if name not in ("token", "created_ms", "crashes", "attempts")
)
_carried_by = attrgetter(*_CARRIED)
_CLAIM, _END, _RENEW, _SWAP = (SCRIPTS[name] for name in ("claim", "end", "renew", "swap"))
#: Which of swap's keys indexes the records of a state.
_IN_LEASES = b"2"
_INDEX = {
    State.PROCESSING: _IN_LEASES,
    State.QUEUED: _IN_LEASES,
    State.FAILED: b"3",
    State.INTERRUPTED: b"4",
}
#: How many records one trip of a sweep reads or writes.
_PER_TRIP = 250


class RedisStore(Store):
    """Stores the records in Redis (6.2 or later) or Valkey, alone, under Sentinel or in a Cluster.

    ``url`` is ``redis://``, ``rediss://``, ``unix://``, ``sentinel://h1:p1;h2:p2/master/db`` or
    ``redis+cluster://h1:p1,h2:p2``, with redis-py's options and ``prefix`` in its query; ``prefix``
    and ``options`` (arguments of redis-py's connections) may also be given apart. Nothing connects
    before the first verb. Safe to share between threads and greenlets and to take along over a
    fork.
    """

    supports_counting = True
    #: Until the server refuses it.
    _takes_results = True

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        prefix: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self._link, named = link_and_prefix(url, options or {})
        self._keys = Keyspace(named if prefix is None else prefix)

    def __repr__(self) -> str:
        return f"<RedisStore: {self._link.where}, prefix {self.prefix}>"

    @property
    def prefix(self) -> str:
        """What all our keys in Redis start with."""
        return self._keys.prefix

    # -- the verbs of a run --

    def _take_key(self, verb: Verb, identity: Identity, asked: Asked) -> Taken:
        """Claim or reserve a key; in one trip where it has no record, or cannot be had."""
        state, attempts = _NEW[verb]
        lease_ms = asked.delay_ms
        assert asked.attempt is not None
        assert lease_ms is not None
        tail = pack_tail(asked.fields, attempt=asked.attempt)
        args = b"%d" % lease_ms, b"%d" % (lease_ms + asked.keep_ms), STARTS[state], b"%d" % attempts
        call = _CLAIM.call(self._keys.of_record(identity)[:2], *args, tail)
        (answer,) = exchange(self._link, (call,))
        if not isinstance(answer, bytes):
            return self._with(answer, identity, lambda look: self._take(verb, look, asked))
        token, now_ms = _STAMP.unpack(answer)
        return Record(
            state=state,
            token=token,
            created_ms=now_ms,
            updated_ms=now_ms,
            deadline_ms=now_ms + lease_ms,
            attempts=attempts,
            **asked.fields,
        )

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, unless the key has another token by now."""
        return self._settle(request) is not _LOST

    def settle_with_result(self, request: SettleRequest, result: ResultWrite) -> SettledWith:
        """Write the end state and the result in one script.

        A server may refuse scripts with two unrelated keys: what looks like one server may be a cluster, or a proxy.
        Then it is not asked again.
        """
        if self._takes_results:
            try:
                return self._settle(request, result)
            except StoreMisconfigured as refused:
                done = self._settle(request)
                self._takes_results = False
                logger.warning("idempotency: results are stored apart from records: %s", refused)
                return done
        return self._settle(request)

    def _settle(self, request: SettleRequest, result: ResultWrite | None = None) -> SettledWith:
        record, identity = request.record, request.record.identity
        answer: Reply = None
        if record.state is PROCESSING and request.restore and not request.note:
            (answer,) = exchange(self._link, (self._end(request, result),))
            if isinstance(answer, bytes):
                return _SETTLED[answer]
        asked = asked_to_settle(request)
        done = self._with(answer, identity, lambda look: self._do("settle", look, asked))
        if done.answer != "settled":
            return _LOST
        stored = result is not None and self.write_result(result)
        return SettledWith.RESULT if stored else SettledWith.NOTHING

    def _end(self, request: SettleRequest, result: ResultWrite | None) -> Command:
        """Return the script that settles the claim in the request, if it still runs."""
        record, fields = request.record, brought(request)
        fields.update(zip(_CARRIED, _carried_by(record), strict=True))
        name, leases, failures, _ = self._keys.of_record(record.identity)
        keys = [name, leases]
        if request.state is _FAILED:
            keys.append(failures)
        written: tuple[bytes, ...] = ()
        if result is not None:
            keys.append(result.key)
            written = result.payload, b"%d" % result.expires_s
        args = STARTS[request.state], b"%d" % max(request.keep_ms, 1), pack_tail(fields), *written
        return _END.call(keys, pack_own(record.token), *args)

    def stores_results_of(self, pool: ConnectionPool) -> bool:
        """Are these connections to the same database, with the same login?"""
        # Who overrides settle() does something in it that a settle with the result would leave out.
        overridden = type(self).settle is not RedisStore.settle or "settle" in vars(self)
        return (
            not overridden
            and isinstance(self._link, Server)
            and is_one_database(self._link.pool, pool)
        )

    def write_result(self, result: ResultWrite) -> bool:
        """Write the result of a task that a record answered, in one script."""
        if not self._takes_results:
            return False
        no_record = b"", b"", b"", b""
        write = _END.call((result.key,), *no_record, result.payload, b"%d" % result.expires_s)
        return self._exchange(write) == [b"stored"]

    def release(
        self, identity: Identity, *, token: int, requeue_ms: int | None = None, note: str = ""
    ) -> bool:
        """Give the key back; in one trip where nothing stays of it."""
        call = _END.call(self._keys.of_record(identity)[:2], pack_own(token))
        (answer,) = exchange(self._link, (call,))
        if isinstance(answer, bytes):
            return True
        asked = Asked(fields={"note": note}, token=token, delay_ms=requeue_ms)
        done = self._with(answer, identity, lambda look: self._do("release", look, asked))
        return done.answer != "lost"

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew, all in one trip; what a sweep has ended since takes another two."""
        calls = []
        for each in leases:
            args = b"%d" % each.lease_ms, b"%d" % (each.lease_ms + each.keep_ms)
            keys = self._keys.of_record(each.identity)[:2]
            calls.append(_RENEW.call(keys, pack_own(each.token), *args))
        return [
            answer == b"renewed" or self._renew_swept(each, answer)
            for each, answer in zip(leases, self._exchange(*calls), strict=True)
        ]

    def _renew_swept(self, each: Renewal, answer: Reply) -> bool:
        asked = Asked(token=each.token, delay_ms=each.lease_ms, keep_ms=each.keep_ms)
        done = self._with(answer, each.identity, lambda look: self._do("renew", look, asked))
        return done.answer == "renewed"

    def _at(self, identity: Identity, verb: Callable[[Look], T]) -> T:
        return self._with(None, identity, verb)

    def _with(self, answer: Reply, identity: Identity, verb: Callable[[Look], T]) -> T:
        """Do a verb with what a script found, ``None`` for nothing yet; anew if somebody else wrote since."""
        highest = 0
        while True:
            if answer is None:
                (answer,) = self._exchange(_CLAIM.call(self._keys.of_record(identity)[:1]))
            try:
                return verb(RedisLook(identity, answer, self._swap, highest))
            except ChangedError as changed:
                answer, highest = None, changed.highest

    def _swap(self, identity: Identity, args: tuple[bytes, ...]) -> Reply:
        return self._exchange(_SWAP.call(self._keys.of_record(identity), *args))[0]

    def _exchange(self, *commands: Command) -> list[Reply]:
        return exchange(self._link, commands)

    # -- upkeep --

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue reservations whose message was not sent in time."""
        found = [name for _, name, _ in self._due_in(LEASES, limit + 1)]
        steps = in_steps(found[:limit], _PER_TRIP)
        swept = [record for step in steps for record in self._sweep_some(step, requeue_ms)]
        return report(swept, more=len(found) > limit)

    def _sweep_some(self, names: Sequence[bytes], requeue_ms: int) -> Iterator[Record]:
        """Decide about some records with two trips: one to look, one to write."""
        plan: list[Command] = []

        def swap_later(identity: Identity, args: tuple[bytes, ...]) -> int:
            plan.append(_SWAP.call(self._keys.of_record(identity), *args))
            return 1

        planned: list[Record | None] = []
        answers = self._exchange(*[_CLAIM.call((name,)) for name in names])
        for name, answer in zip(names, answers, strict=True):
            try:
                look = RedisLook(self._keys.identity(name), answer, swap_later)
            except StoreMisconfigured:
                continue  # left to the newer version that wrote it
            record = self._sweep(look, requeue_ms)
            if record is None:
                look.mend()
            planned.append(record)
        # Whoever wrote meanwhile knows better, or the next sweep finds it.
        for record, written in zip(planned, self._exchange(*plan), strict=True):
            if record is not None and written == 1:
                yield record

    def prune(self, *, limit: int) -> int:
        """Drop index entries of expired records, to the end of a millisecond; Redis drops the records by itself."""
        pruned = 0
        for kind in (FAILURES, INTERRUPTED):
            ends = {index: end for index, _, end in self._due_in(kind, limit - pruned)}
            drops = (plain(b"ZREMRANGEBYSCORE", i, b"-inf", b"%d" % end) for i, end in ends.items())
            pruned += sum(self._exchange(*drops))
        return pruned

    def _due_in(self, kind: bytes, limit: int) -> list[tuple[bytes, bytes, int]]:
        """Return index, name and score of up to ``limit`` entries whose time has come, of each index in its order.

        Round by round all buckets give a few: one that a client filled on purpose keeps no other one waiting. The
        rounds start anywhere, so that a limit never starves the same buckets.
        """
        start, now = random.randrange(BUCKETS), b"%d" % self.now_ms()
        indexes = self._keys.index(kind)
        indexes = indexes[start:] + indexes[:start]
        found: list[tuple[bytes, bytes, int]] = []
        at, most = 0, limit // 64 + 1
        while indexes and len(found) < limit:
            place = b"WITHSCORES", b"LIMIT", b"%d" % at, b"%d" % most
            asks = [plain(b"ZRANGEBYSCORE", index, b"-inf", now, *place) for index in indexes]
            due = list(zip(indexes, map(pairs, self._exchange(*asks)), strict=True))
            found += [(index, name, int(float(end))) for index, some in due for name, end in some]
            indexes = [index for index, some in due if len(some) == most]
            at += most
        return found[:limit]

    # -- what operators see --

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records."""
        search = Search(self._link, self._keys, selection, limit=limit, now_ms=self.now_ms())
        return search.scan(cursor, look_at) if selection.scans else search.walk(cursor, look_at)

    def stats(self) -> Stats:
        """Count what the indexes know."""
        at_ms, keys = self.now_ms(), self._keys
        now, later = b"%d" % at_ms, b"(%d" % at_ms
        # The score of a mark, in microseconds, is beyond any deadline.
        bounds = (
            (LEASES, b"-inf", now),
            (LEASES, later, b"(1e14"),
            (INTERRUPTED, later, b"+inf"),
            (FAILURES, later, b"+inf"),
        )
        counts = [plain(b"ZCOUNT", i, *ends) for kind, *ends in bounds for i in keys.index(kind)]
        swept, *answers = self._exchange(plain(b"GET", keys.swept), *counts)
        stale, live, interrupted, failed = map(sum, in_steps(answers, BUCKETS))
        return Stats(
            live=live,
            stale=stale,
            interrupted=interrupted,
            failed=failed,
            now_ms=at_ms,
            swept_ms=None if swept is None else int(swept),
        )

    def note_sweep(self) -> None:
        """Note that a sweep ended just now."""
        self._exchange(plain(b"SET", self._keys.swept, b"%d" % self.now_ms()))

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        """Add to the counters of this hour."""
        name = self._keys.counts(self.now_ms() // HOUR_MS)
        commands = [
            plain(b"HINCRBY", name, f"{outcome} {task}".encode(), b"%d" % number)
            for (task, outcome), number in outcomes.items()
        ]
        self._exchange(*commands, plain(b"EXPIRE", name, b"%d" % (COUNTED_HOURS * 3600)))

    def counts(self, *, hours: int) -> Sequence[Counted]:
        """Return the counters of the last hours."""
        last = self.now_ms() // HOUR_MS
        wanted = range(last - min(hours, COUNTED_HOURS) + 1, last + 1)
        answers = self._exchange(*(plain(b"HGETALL", self._keys.counts(hour)) for hour in wanted))
        found = []
        for hour, answer in zip(wanted, answers, strict=True):
            for field, number in pairs(answer):
                outcome, _, task = field.decode().partition(" ")
                found.append(Counted(hour=hour, task=task, outcome=outcome, count=int(number)))
        return sorted(found, key=lambda each: (each.hour, each.task, each.outcome))

    def now_ms(self) -> int:
        """Return the time by the clock of one server."""
        ((seconds, micros),) = self._exchange(plain(b"TIME", node=self._link.nodes()[0]))
        return int(seconds) * 1000 + int(micros) // 1000

    def facts(self) -> Sequence[ServerFacts]:
        """Ask each server what concerns its records: version, eviction, persistence."""
        return [facts_of(self._link, node) for node in self._link.nodes()]

    def missing_rights(self) -> Sequence[str]:
        """Return the commands that a worker needs and this user may not run; Redis 6 cannot be asked."""
        # In a Cluster each server has its own users: some buckets of most of them.
        rights = [SCRIPTS["rights"].call((key,)) for key in self._keys.index(LEASES)[::8]]
        return sorted({each.decode() for missing in self._exchange(*rights) for each in missing})

    def close(self) -> None:
        """Close the idle connections."""
        self._link.close()


class ChangedError(Exception):
    """Somebody else wrote since the look, or gave out the ``highest`` token."""

    def __init__(self, highest: int) -> None:
        super().__init__(highest)
        self.highest = highest


class RedisLook(Look):
    """What one look found."""

    def __init__(self, identity: Identity, answer: Reply, swap: Swap, highest: int = 0) -> None:
        found, left_ms, seconds, micros = answer
        self.identity, self._swap = identity, swap
        self.packed: bytes = found or b""
        self.now_us = int(seconds) * 1_000_000 + int(micros)
        self.stored, self.highest = None, highest
        if found:
            self.stored = unpack(identity, found, self.now_us // 1000 + max(left_ms, 0))
            self.highest = max(highest, self.stored.record.token)

    def write(self, after: StoredRecord) -> None:
        """Store this instead of what the look found."""
        before, record = self.stored, after.record
        life = b"%d" % (after.expires_ms - self.now_us // 1000)
        if before is not None and before.expires_ms == after.expires_ms:
            life = b""
        # A settle that restores a lost record brings its token back; other new records, or new tokens, are new ones.
        restores = before is None and record.state.settled
        is_new = not restores and (before is None or before.record.token != record.token)
        enters = _INDEX.get(record.state, b"")
        # A lost record left its entry behind.
        leaves = _IN_LEASES if before is None else _INDEX.get(before.record.state, b"")
        self._write(
            pack(after, os.urandom(4)),
            life=life,
            token=b"%d" % record.token if is_new else b"",
            enters=enters,
            score=after.expires_ms if record.deadline_ms is None else record.deadline_ms,
            leaves=leaves if leaves != enters else b"",
        )

    def remove(self, *, forget: bool) -> None:  # noqa: ARG002
        """Delete what the look found."""
        assert self.stored is not None
        self._write(b"", leaves=_INDEX.get(self.stored.record.state, b""))

    def mend(self) -> None:
        """Take a record that no sweep has to look at out of the index of leases, or put it where it belongs."""
        record = self.stored and self.stored.record
        if record and record.deadline_ms and record.deadline_ms > self.now_us // 1000:
            self._write(self.packed, enters=_IN_LEASES, score=record.deadline_ms)
        else:
            self._write(self.packed, leaves=_IN_LEASES)

    def _write(
        self,
        packed: bytes,
        *,
        life: bytes = b"",
        token: bytes = b"",
        enters: bytes = b"",
        score: int = 0,
        leaves: bytes = b"",
    ) -> None:
        """Write, unless somebody else did."""
        seen = self.packed[: HEAD.size]
        args = seen, packed, life, token, enters, b"%d" % score, leaves
        done = self._swap(self.identity, args)
        if done != 1:
            raise ChangedError(int(done))
