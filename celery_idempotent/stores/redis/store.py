"""Records in Redis or Valkey: scripts are the fast paths of a run, the table decides everything else in Python."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from struct import Struct
from time import monotonic_ns
from typing import TYPE_CHECKING, Any, TypeVar

from celery_idempotent import records
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, Record, Selection, SettleRequest, State
from celery_idempotent.stores import base, table
from celery_idempotent.stores.fields import Unreadable
from celery_idempotent.stores.redis import format as layout
from celery_idempotent.stores.redis import servers
from celery_idempotent.stores.redis.servers import Command, Reply, call, exchange, pairs
from celery_idempotent.stores.table import Snapshot, StoredRecord, Verb

if TYPE_CHECKING:
    from redis import ConnectionPool

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The token and the time of a new record.
_STAMP = Struct(">QQ")
_SETTLED: dict[bytes, records.SettledWith] = {b"stored": "stored", b"settled": "settled"}
_SCRIPTS = "claim", "end", "renew", "swap", "prune"
_CLAIM, _END, _RENEW, _SWAP, _PRUNE = (servers.SCRIPTS[name] for name in _SCRIPTS)
#: The key of ``swap`` that indexes the records of a state.
_INDEX = {state: b"%d" % (layout.KINDS.index(kind) + 2) for state, kind in layout.INDEXED.items()}
_IN_LEASES = _INDEX[State.PROCESSING]
#: The number of records that one trip of a sweep reads or writes.
_PER_TRIP = 250
#: The last byte read of each record for a list, whose value, message and steps come last and may be megabytes: an
#: operator's note has up to 600 characters, a task id 255, an error 200, each of up to 4 bytes.
_SUMMARY = b"4999"
#: The most keys that one trip of a list reads, or one step of its scan looks for.
_STEP = 500
#: How many names a list reads of each index at a time.
_NAMES = 16


class RedisStore(base.Store):
    """Stores the records in Redis (6.2 or later) or Valkey, alone, under Sentinel or in a Cluster.

    ``url`` is as for :func:`.servers.link_and_prefix`. Nothing connects before the first verb. Safe to share between
    threads and greenlets, and over a fork.
    """

    supports_counting = True
    #: ``False`` once the server has refused a result beside a record.
    _takes_results = True
    #: The server's time as the last claim was answered, ms, and that by the monotonic clock, ns.
    _clock = 0, -1_000_000_000

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        prefix: str | None = None,
        options: Mapping[str, object] | None = None,
    ) -> None:
        self._link, named = servers.link_and_prefix(url, options or {})
        self.prefix = named if prefix is None else prefix
        self._keys = layout.Keyspace(self.prefix)
        self._link.before_first = self._check_layout

    def __repr__(self) -> str:
        return f"<RedisStore: {self._link.where}, prefix {self.prefix}>"

    def _check_layout(self) -> None:
        """Refuse all verbs beside records of another layout: none would be found, and their operations run again."""
        (number,) = exchange(self._link, [(b"GET", self._keys.layout)], first=True)
        if number not in (None, layout.LAYOUT):
            raise StoreMisconfigured(
                f"{self._link.where} has records of layout {number.decode()} under the prefix {self.prefix}: this"
                " version would not find them, and run their operations again. Run the version that wrote them until"
                " they have expired, then delete its keys or choose another ?prefix="
            )
        self._link.before_first = None

    # -- the verbs of a run --

    def fast(self, verb: Verb, request: Any) -> Any:
        """Claim or reserve a free key by one script, whose other answer the table needs, or settle by one."""
        if verb == "settle":
            return self._end(request)
        identity, state = request.identity, table.QUEUED
        if verb == "claim":
            state, delay_ms = table.PROCESSING, request.lease_ms
            numbers = 0, 1, 0, delay_ms
            ids = layout.NO_WRITE, request.attempt
            tail = layout.tail(layout.CLAIMED, request, request, numbers, ids, request.message)
        else:
            args, delay_ms = table.arguments(request), request.deadline_ms
            rule = table.decide(verb, None, args, 0)
            tail = layout.pack(table.after(rule, None, args, 0, 0))[layout.START.size :]
        times = b"%d" % delay_ms, b"%d" % (delay_ms + request.keep_ms)
        keys = self._keys.of_record(identity)[:2]
        (found,) = exchange(self._link, (call(_CLAIM, keys, *times, layout.STARTS[state], tail),))
        if not isinstance(found, bytes):
            return self._take(verb, request, found)
        token, now_ms = _STAMP.unpack(found)
        self._clock = now_ms, monotonic_ns()
        if verb != "claim":
            return records.Reserved(table.after(rule, None, args, now_ms, token).record)
        return records.Claimed(table.first_claim(request, token, now_ms))

    def _end(
        self, request: SettleRequest, result: records.ResultWrite | None = None
    ) -> records.SettledWith | None:
        """Settle a claim by one script, with the task's result if there is one; ``None``: look at what is there."""
        record = request.record
        is_large = max(record.crashes, record.attempts) > layout.MOST
        if record.state is not table.PROCESSING or not request.restore or request.note or is_large:
            return None
        is_failed = request.state is not table.COMPLETED
        keys = self._keys.of_record(record.identity)[: 3 if is_failed else 2]
        # A claim of the last second has the time as well as TIME, which takes 7 % of a task on the server.
        now_ms, then_ns = self._clock
        passed_ms = (monotonic_ns() - then_ns) // 1_000_000
        is_known = passed_ms < 1_000 and not is_failed
        numbers = record.crashes, record.attempts, now_ms + passed_ms if is_known else 0, 0
        tail = layout.tail(
            layout.SETTLED, request, record, numbers, layout.NO_IDS, request.message, request.value
        )
        start = layout.START.pack(layout.STARTS[request.state], record.token, record.created_ms)
        # It begins as the one that runs, unless a sweep counted a crash before a renewal: then the table settles.
        keep_ms = table.kept_ms(request.keep_ms, record.copies)
        args: tuple[bytes, ...] = start + tail, b"%d" % keep_ms
        if result is not None:
            keys = *keys, result.key
            args = *args, result.payload, b"%d" % result.expires_s
        try:
            (done,) = exchange(self._link, (call(_END, keys, *args),))
        except StoreMisconfigured as refused:
            if result is None:
                raise
            # A cluster or a proxy may look like one server, but takes no scripts with two unrelated keys.
            settled = self._end(request)
            self._takes_results = False
            logger.warning("idempotency: results are stored apart from records: %s", refused)
            return settled
        return _SETTLED[done] if isinstance(done, bytes) else None

    def settle_with_result(
        self, request: SettleRequest, result: records.ResultWrite
    ) -> records.SettledWith:
        done = self._end(request, result if self._takes_results else None)
        return done or ("settled" if self._settle(request) else "lost")

    def stores_results_of(self, pool: ConnectionPool) -> bool:
        # An overridden settle() does something that a settle with the result would leave out.
        overridden = type(self).settle is not RedisStore.settle or "settle" in vars(self)
        link = self._link
        is_one = isinstance(link, servers.Server) and servers.is_one_database(link.pool, pool)
        return is_one and not overridden

    def write_result(self, result: records.ResultWrite) -> bool:
        if not self._takes_results:
            return False
        life = (b"EX", b"%d" % result.expires_s) if result.expires_s else ()
        write = b"SET", result.key, result.payload, b"NX", *life
        told = b"PUBLISH", result.key, result.payload
        *_, done = exchange(self._link, ((b"MULTI",), write, told, (b"EXEC",)))
        return bool(done[0] == b"OK")  # else its backend looks at what is there

    def release(self, identity: Identity, *, token: int, **how: Any) -> bool:
        keys = self._keys.of_record(identity)[:2]
        (found,) = exchange(self._link, (call(_END, keys, layout.pack_own(token)),))
        return isinstance(found, bytes) or super().release(identity, token=token, **how)

    def renew(self, leases: Sequence[records.Renewal]) -> list[bool]:
        """Let each lease start anew, all in one trip; those that a sweep has ended take more."""
        calls = []
        for each in leases:
            args = b"%d" % each.lease_ms, b"%d" % (each.lease_ms + each.keep_ms)
            keys = self._keys.of_record(each.identity)[:2]
            calls.append(call(_RENEW, keys, layout.pack_own(each.token), *args))
        answers = zip(leases, self._exchange(*calls), strict=True)
        return [answer == b"renewed" or self._renew(each) for each, answer in answers]

    def _at(self, identity: Identity, verb: Callable[[Snapshot], T], found: Reply = None) -> T:
        """Do a verb with a script's answer (``found``) or a look; again if another client wrote since."""
        highest = 0
        while True:
            if found is None:
                (found,) = self._exchange(call(_CLAIM, self._keys.of_record(identity)[:1]))
            snapshot = RedisSnapshot(identity, self._keys, found, highest)
            result = verb(snapshot)
            (written,) = self._exchange(snapshot.swap) if snapshot.swap else (1,)
            if written == 1:
                return result
            found, highest = None, int(written)

    def discard(self, identity: Identity) -> bool:
        name, *indexes = self._keys.of_record(identity)
        done = self._exchange((b"DEL", name), *((b"ZREM", index, name) for index in indexes))
        return bool(done[0])

    def _exchange(self, *commands: Command) -> list[Reply]:
        return exchange(self._link, commands)

    # -- upkeep --

    def _due(self, limit: int) -> Sequence[Identity]:
        # All buckets give a few, in rounds from a random one: a full bucket starves no other.
        start, now = random.randrange(layout.BUCKETS), b"%d" % self.now_ms()
        indexes = (2 * self._keys.index(layout.LEASES))[start : start + layout.BUCKETS]
        found: list[bytes] = []
        at, most = 0, limit // 64 + 1
        while indexes and len(found) < limit:
            place = b"LIMIT", b"%d" % at, b"%d" % most
            asks = [(b"ZRANGEBYSCORE", index, b"-inf", now, *place) for index in indexes]
            due = list(zip(indexes, self._exchange(*asks), strict=True))
            found += [name for _, some in due for name in some]
            indexes = [index for index, some in due if len(some) == most]
            at += most
        return [self._keys.identity(name) for name in found]

    def _sweep_all(self, due: Sequence[Identity], requeue_ms: int) -> Iterator[Record | None]:
        """Decide about some records at a time, with two trips: one to look, one to write."""
        for at in range(0, len(due), _PER_TRIP):
            some = due[at : at + _PER_TRIP]
            looks = [call(_CLAIM, self._keys.of_record(each)[:1]) for each in some]
            swept, swaps = [], []
            for each, answer in zip(some, self._exchange(*looks), strict=True):
                with suppress(Unreadable):  # left to the newer version that wrote it
                    snapshot = RedisSnapshot(each, self._keys, answer)
                    swept.append(self._sweep(snapshot, requeue_ms))
                    swaps.append(snapshot.swap or snapshot.mend())
            # A record that another client wrote meanwhile is left to that, or to the next sweep.
            for record, written in zip(swept, self._exchange(*swaps), strict=True):
                yield record if written == 1 else None

    def prune(self, *, limit: int) -> int:
        # Of each index the oldest are looked at and, as records are kept for different times, some others at random. An
        # index that had mostly entries to remove is looked at again, for twice as many.
        letters = {
            index: layout.STARTS[state][:1]
            for state in (State.FAILED, State.INTERRUPTED)
            for index in self._keys.index(layout.INDEXED[state])
        }
        indexes = random.sample([*letters], len(letters))
        pruned, most = 0, limit // 4096 + 1
        while indexes and pruned < limit:
            size, left = b"%d" % min(most, 64), limit - pruned
            first = b"-inf", b"+inf", b"LIMIT", b"0", size
            asks: list[Command] = [(b"ZRANGEBYSCORE", index, *first) for index in indexes]
            asks += [(b"ZRANDMEMBER", index, size) for index in indexes]
            found, looks = self._exchange(*asks), []
            for index, *names in zip(indexes, found, found[len(indexes) :], strict=False):
                some = [*dict.fromkeys(itertools.chain(*names))][:left]
                left -= len(some)
                looks += [(index, *some)] if some else []
            gone = self._exchange(*(call(_PRUNE, look, letters[look[0]]) for look in looks))
            pruned += sum(gone)
            indexes = [look[0] for look, n in zip(looks, gone, strict=True) if 8 * n >= len(look)]
            most *= 2
        return pruned

    # -- what operators see --

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> records.Page:
        now_ms = self.now_ms()
        find = self._scan if selection.scans else self._walk
        found, looked_at, after = find(selection, now_ms, cursor, limit, look_at)
        return records.Page(records=(*found,), cursor=after, looked_at=looked_at, now_ms=now_ms)

    def _walk(
        self, selection: Selection, now_ms: int, cursor: str, limit: int, look_at: int
    ) -> tuple[Sequence[Record], int, str]:
        """Merge the indexes of all buckets by score, from the highest on, or from the longest stale.

        The cursor is a score, and how many had it.
        """
        kinds = sorted({layout.INDEXED[state] for state in selection.wanted})
        kind = b"".join(kinds).decode() + "!stale" * selection.stale
        score, same = base.read_cursor(cursor, kind, 2)
        entries = itertools.islice(self._entries(selection, now_ms, kinds, score), same, None)
        found, looked_at = list[Record](), 0
        while looked_at < look_at and len(found) < limit:
            # The first step usually fills the page; the steps after that are larger.
            most = min(_STEP if looked_at else limit, look_at - looked_at)
            step = [*itertools.islice(entries, most)]
            if not step:
                return found, looked_at, ""
            wanted = self._wanted(selection, now_ms, [name for _, name in step])
            for at, name in step:
                looked_at += 1
                score, same = at, same + 1 if at == score else 1
                if name in wanted:
                    found.append(wanted[name])
                if len(found) >= limit:
                    break
        return found, looked_at, base.write_cursor(kind, score, same)

    def _scan(
        self, selection: Selection, now_ms: int, cursor: str, limit: int, look_at: int
    ) -> tuple[Sequence[Record], int, str]:
        """Scan all keys; the cursor is a node, and the cursor of its ``SCAN``.

        A page ends between two steps, for a step that is repeated may give other keys, or give them in another order.
        """
        number, at = base.read_cursor(cursor, "s", 2)
        count, nodes = min(limit, _STEP), self._link.nodes()
        found, looked_at = list[Record](), 0
        while number < len(nodes) and len(found) < limit and looked_at < look_at:
            step = (b"SCAN", b"%d" % at, b"MATCH", self._keys.pattern, b"COUNT", b"%d" % count)
            ((after, names),) = exchange(self._link, [step], nodes[number])
            # A step looks at about so many keys, those of other applications included.
            looked_at += max(len(names), count)
            wanted, room = self._wanted(selection, now_ms, names).values(), limit - len(found)
            if len(wanted) > room and (found or count > 1):
                if found:
                    break  # the next page has them
                count //= 2
                continue
            found += wanted
            if 4 * len(wanted) < room:
                count = min(2 * count, _STEP)
            # redis-py's client of a Cluster has the cursor of each node.
            (at,) = map(int, after.values() if isinstance(after, dict) else (after,))
            number += not at
        return found, looked_at, base.write_cursor("s", number, at) if number < len(nodes) else ""

    def _entries(
        self, selection: Selection, now_ms: int, kinds: Sequence[bytes], first_score: int
    ) -> Iterator[tuple[int, bytes]]:
        """Yield scores and names of all indexes from a score on (0: from the first); stale ones upwards until now."""
        indexes = [index for kind in kinds for index in self._keys.index(kind)]
        start, now = b"%d" % first_score, b"%d" % now_ms
        since = b"%d" % (selection.since_ms or 0)  # no deadline is before the last change
        downwards = start if first_score else b"+inf", since, b"BYSCORE", b"REV"
        order = (start, now, b"BYSCORE") if selection.stale else downwards
        how = *order, b"WITHSCORES", b"LIMIT"

        def ask(some: Sequence[bytes], at: int) -> list[Reply]:
            place = b"%d" % at, b"%d" % _NAMES
            return self._exchange(*((b"ZRANGE", index, *how, *place) for index in some))

        def entries(index: bytes, answer: Reply) -> Iterator[tuple[int, bytes]]:
            for at in itertools.count(_NAMES, _NAMES):
                found = pairs(answer)
                for name, score in found:
                    if name != layout.MARK:
                        yield int(float(score)), name
                if len(found) < _NAMES:
                    return
                (answer,) = ask([index], at)

        answers = zip(indexes, ask(indexes, 0), strict=True)
        merged = (entries(*each) for each in answers if each[1])
        return heapq.merge(*merged, key=lambda entry: entry[0], reverse=not selection.stale)

    def _wanted(
        self, selection: Selection, now_ms: int, names: Sequence[bytes]
    ) -> dict[bytes, Record]:
        """Read the records with these names; return those that are wanted, often none of thousands."""
        ends = tuple(f":{key}".encode() for key in selection.keys) or (b"",)
        identity = self._keys.identity
        # The end first, which is fast: a search for one key looks at a million names.
        named = [n for n in names if n.endswith(ends) and selection.names(identity(n))]
        reads = self._exchange(*((b"GETRANGE", name, b"0", _SUMMARY) for name in named))
        found: dict[bytes, Record] = {}
        for name, packed in zip(named, reads, strict=True):
            try:
                record = layout.unpack(self._keys, identity(name), packed, summary=True).record
                if selection.includes(record, now_ms):
                    found[name] = record
            except Unreadable as error:  # noqa: PERF203
                if packed:  # else it is gone
                    logger.warning("idempotency: %s", error)
        return found

    def stats(self) -> records.Stats:
        now_ms = self.now_ms()
        now, later = b"%d" % now_ms, b"(%d" % now_ms
        # The score of a mark, in microseconds, is larger than any deadline.
        bounds = {
            "stale": (layout.LEASES, b"-inf", now),
            "live": (layout.LEASES, later, b"(1e14"),
            "interrupted": (layout.INTERRUPTED, b"-inf", b"+inf"),
            "failed": (layout.FAILURES, b"-inf", b"+inf"),
        }
        asks = [
            (b"ZCOUNT", index, *ends)
            for kind, *ends in bounds.values()
            for index in self._keys.index(kind)
        ]
        *counts, swept = self._exchange(*asks, (b"GET", self._keys.swept))
        size = layout.BUCKETS
        sums: Any = {name: sum(counts[n * size :][:size]) for n, name in enumerate(bounds)}
        return records.Stats(now_ms=now_ms, swept_ms=None if swept is None else int(swept), **sums)

    def note_sweep(self) -> None:
        self._exchange((b"SET", self._keys.swept, b"%d" % self.now_ms()))

    def mark_use(self, *, lost_ms: int = 0) -> int:
        words = (b"%d" % lost_ms,) if lost_ms else (b"-%d" % self.now_ms(), b"NX")
        name = self._keys.used
        _, mark = self._exchange((b"SET", name, *words), (b"GET", name))
        return int(mark or 0)

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        now_ms = self.now_ms()
        adds: list[Command] = [(b"SET", self._keys.layout, layout.LAYOUT, b"NX")]
        for period in base.PERIODS:
            name = self._keys.counts(period.ms, period.start(now_ms))
            adds += [
                (b"HINCRBY", name, f"{outcome} {task}".encode(), b"%d" % number)
                for (task, outcome), number in outcomes.items()
            ]
            adds.append((b"EXPIRE", name, b"%d" % (period.ms // 1000 * period.kept)))
        self._exchange(*adds)

    def _counts(self, period: base.Period, starts: Sequence[int]) -> Sequence[records.Counted]:
        names = [self._keys.counts(period.ms, start_ms) for start_ms in starts]
        answers = self._exchange(*((b"HGETALL", name) for name in names))
        return [
            records.Counted(start_ms=start_ms, task=task, outcome=outcome, count=int(number))
            for start_ms, answer in zip(starts, answers, strict=True)
            for name, number in pairs(answer)
            for outcome, _, task in [name.decode().partition(" ")]
        ]

    def now_ms(self) -> int:
        ((seconds, micros),) = exchange(self._link, [(b"TIME",)], self._link.nodes()[0])
        return int(seconds) * 1000 + int(micros) // 1000

    def facts(self) -> Sequence[base.ServerFacts]:
        return [servers.facts_of(self._link, node) for node in self._link.nodes()]

    def missing_rights(self) -> Sequence[str]:
        # In a Cluster each server has users of its own: some buckets of most of them.
        names = self._keys.index(layout.LEASES)[::8]
        asks = [call(servers.SCRIPTS["rights"], (name,)) for name in names]
        missing = exchange(self._link, asks, first=True)
        return sorted({each.decode() for some in missing for each in some})

    def close(self) -> None:
        self._link.close()


class RedisSnapshot(Snapshot):
    """What one look found; ``swap`` writes the outcome of a verb, unless another client wrote since."""

    swap: Command | None = None

    def __init__(
        self, identity: Identity, keys: layout.Keyspace, answer: Reply, highest: int = 0
    ) -> None:
        found, left_ms, seconds, micros = answer
        self._identity, self._keys = identity, keys
        self._packed: bytes = found or b""
        self.now_us = int(seconds) * 1_000_000 + int(micros)
        self.stored, self.highest = None, highest
        if found:
            expires_ms = self.now_us // 1000 + max(left_ms, 0)
            self.stored = layout.unpack(keys, identity, found, expires_ms)
            self.highest = max(highest, self.stored.record.token)

    def write(self, after: StoredRecord) -> None:
        before, record = self.stored, after.record
        life = b"%d" % (after.expires_ms - self.now_us // 1000)
        if before is not None and before.expires_ms == after.expires_ms:
            life = b""
        # A settle that restores a lost record brings its token back; any other new record has a new one.
        restores = before is None and record.state.is_final
        is_new = not restores and (before is None or before.record.token != record.token)
        token = b"%d" % record.token if is_new else b""
        score = record.updated_ms if record.deadline_ms is None else record.deadline_ms
        # A lost record left its entry behind.
        leaves = _IN_LEASES if before is None else _INDEX.get(before.record.state, b"")
        packed, enters = layout.pack(after, os.urandom(4)), _INDEX.get(record.state, b"")
        self._swap(packed, enters, score, leaves, life, token)

    def remove(self, *, forget: bool) -> None:  # noqa: ARG002
        assert self.stored is not None
        self._swap(b"", b"", 0, _INDEX.get(self.stored.record.state, b""))

    def mend(self) -> Command:
        """Correct the record's entry in the index of leases, or delete it if no sweep has to look at the record."""
        record = self.stored and self.stored.record
        if record and record.deadline_ms and record.deadline_ms > self.now_us // 1000:
            return self._swap(self._packed, _IN_LEASES, record.deadline_ms, b"")
        return self._swap(self._packed, b"", 0, _IN_LEASES)

    def _swap(
        self, packed: bytes, enters: bytes, score: int, leaves: bytes, *life_and_token: bytes
    ) -> Command:
        anew, leaves = life_and_token or (b"", b""), leaves if leaves != enters else b""
        head, keys = self._packed[: layout.HEAD.size], self._keys.of_record(self._identity)
        self.swap = call(_SWAP, keys, head, packed, *anew, enters, b"%d" % score, leaves)
        return self.swap
