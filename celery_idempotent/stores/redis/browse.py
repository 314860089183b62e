"""What operators see of Redis: lists of records, by the indexes or by a scan, and counters by the hour."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TypeGuard

from celery_idempotent.records import Counted, Page, Record, Selection, State, Stats
from celery_idempotent.stores.base import COUNTED_HOURS, HOUR_MS, read_cursor, write_cursor
from celery_idempotent.stores.redis.format import state_of, unpack
from celery_idempotent.stores.redis.keyspace import BUCKETS, MARK, Keyspace
from celery_idempotent.stores.redis.servers import (
    Link,
    Reply,
    Servers,
    ask_indexes,
    exchange,
    in_steps,
    now_ms,
    pairs,
    plain,
)

#: The last byte read of each record: the start has all but its value, message and steps, which may be megabytes.
_SUMMARY = b"2047"

#: How many keys are read at once, or looked for by one step of a scan.
_STEP = 500

#: How many names of each bucket are read at first for a merge, and how many more of a bucket that has more.
_AHEAD = 8, 64

#: Of one bucket in so many the highest scores are read first.
_SAMPLED = 16

#: Beyond any deadline: the score of a mark is a time in microseconds.
_DEADLINES = b"(1e14"


class Browsing(Servers):
    """The verbs that operators use: lists, counts, and counters by the hour."""

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records."""
        walk = _Search(self._link, self._keys, selection, limit)
        if selection.scans:
            return walk.scan(cursor, look_at)
        if selection.newest_first:
            return walk.newest(cursor, look_at)
        return walk.through(cursor, look_at)

    def stats(self) -> Stats:
        """Count what the indexes know."""
        at_ms, commands = self.now_ms(), [plain(b"GET", self._keys.swept)]
        later = b"(%d" % at_ms
        for bucket in range(BUCKETS):
            leases = self._keys.leases(bucket)
            commands += (
                plain(b"ZCOUNT", leases, b"-inf", b"%d" % at_ms),
                plain(b"ZCOUNT", leases, later, _DEADLINES),
                plain(b"ZCOUNT", self._keys.interrupted(bucket), later, b"+inf"),
                plain(b"ZCOUNT", self._keys.failures(bucket), later, b"+inf"),
            )
        swept, *answers = self._exchange(*commands)
        stale, live, interrupted, failed = (sum(answers[n::4]) for n in range(4))
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


class _Search:
    """The search for one page: the records found so far, and how many keys it has looked at."""

    def __init__(self, link: Link, keys: Keyspace, selection: Selection, limit: int) -> None:
        self._link = link
        self._keys = keys
        self._selection = selection
        self._wanted = selection.wanted
        self._ends = tuple(f":{key}".encode() for key in selection.keys) or (b"",)
        self._limit = limit
        self._now_ms = now_ms(link)
        self._found: list[Record] = []
        self._looked_at = 0

    def through(self, cursor: str, look_at: int) -> Page:
        """Walk through the indexes, bucket by bucket; the cursor is the number of an index and bucket, and the place
        in it.
        """
        start, skip = read_cursor(cursor, "l", 2)
        for place, first, names in self._of_indexes(start, skip):
            at = first
            for step in in_steps(names, _STEP):
                for record in self._records(step):
                    self._looked_at, at = self._looked_at + 1, at + 1
                    self._take(record)
                    if len(self._found) >= self._limit or self._looked_at >= look_at:
                        return self._page("l", place, at)
        return self._page()

    def newest(self, cursor: str, look_at: int) -> Page:
        """Merge the buckets of an index, highest scores first; the cursor is a score, and how many of it were seen.

        The score is when the record expires; those of one millisecond share it.
        """
        score, same = read_cursor(cursor, "n", 2)
        entries = self._highest(score, same)
        while self._looked_at < look_at:
            # Usually the first ones fill the page. If a filter leaves few of them, the steps get larger.
            most = min(_STEP if self._looked_at else self._limit, look_at - self._looked_at)
            step = list(itertools.islice(entries, most))
            for each, record in zip(step, self._records([e[1] for e in step]), strict=True):
                self._looked_at += 1
                self._take(record)
                score, same = each[0], same + 1 if each[0] == score else 1
                if len(self._found) >= self._limit:
                    return self._page("n", score, same)
            if len(step) < most:
                return self._page()
        return self._page("n", score, same)

    def scan(self, cursor: str, look_at: int) -> Page:
        """Scan all keys; the cursor is the node, the cursor of its ``SCAN``, and how many keys a step looks for.

        A page ends between two steps, never within one: Redis promises to pass over no key from step to step, but the
        same step, asked for again, may give other keys in another order once the server has resized its table::

            page 1: SCAN 0 gives a b c d, of which a and b fill it
            a key of somebody else comes: the table grows
            page 2: SCAN 0 gives c a; "the third one on" would leave c out

        A step with more than the page has room for is therefore left to the next page, or made smaller.
        """
        number, at, count = read_cursor(cursor, "s", 3)
        count = count or _STEP
        nodes = self._link.nodes()
        while number < len(nodes) and len(self._found) < self._limit and self._looked_at < look_at:
            step = (b"SCAN", b"%d" % at, b"MATCH", self._keys.pattern, b"COUNT", b"%d" % count)
            ((after, names),) = exchange(self._link, [plain(*step, node=nodes[number])])
            # A step looks at about so many keys, those of other applications included.
            self._looked_at += max(len(names), count)
            # Of thousands of names often none is wanted: then no record is read.
            wanted = [name for name in names if self._is_named(name)]
            found = [record for record in self._records(wanted) if self._includes(record)]
            room = self._limit - len(self._found)
            if len(found) > room and (self._found or count > 1):
                count = max(count * self._limit // (len(found) + 1), 1)
                if self._found:
                    break
                continue
            self._found += found
            if len(found) < room // 4:
                count = min(2 * count, _STEP)
            # redis-py's client of a Cluster has the cursor of each node.
            (at,) = map(int, after.values() if isinstance(after, dict) else (after,))
            number += not at
        return self._page("s", number, at, count) if number < len(nodes) else self._page()

    def _of_indexes(self, start: int, skip: int) -> Iterator[tuple[int, int, Sequence[bytes]]]:
        """Yield each place (a bucket of one index after the other), from which position on, and the names there."""
        indexes = self._indexes()
        # No more of a bucket than a page can look at, and 128 buckets at a time: most are empty.
        for places in in_steps(range(start, len(indexes) * BUCKETS), 128):
            firsts = [skip if place == start else 0 for place in places]
            names = [indexes[place // BUCKETS](place % BUCKETS) for place in places]
            answers = exchange(
                self._link,
                [
                    plain(b"ZRANGE", n, b"%d" % at, b"%d" % (at + 4999))
                    for n, at in zip(names, firsts, strict=True)
                ],
            )
            for place, first, found in zip(places, firsts, answers, strict=True):
                if found:
                    yield place, first, found[:-1] if found[-1] == MARK else found

    def _indexes(self) -> list[Callable[[int], bytes]]:
        """Return the indexes in which all wanted records are."""
        keys = self._keys
        found: list[Callable[[int], bytes]] = []
        if not self._wanted <= {State.INTERRUPTED, State.FAILED}:
            found.append(keys.leases)
        wanted = ((State.INTERRUPTED, keys.interrupted), (State.FAILED, keys.failures))
        return found + [index for state, index in wanted if state in self._wanted]

    def _highest(self, score: int, same: int) -> Iterator[tuple[int, bytes]]:
        """Yield scores and names from a score on (0: from the top), but for the first ``same`` of that score."""
        wanted = same + self._limit
        lowest = self._estimate(score, wanted)
        first = list(itertools.islice(self._downwards(score, lowest), wanted))
        yield from first[same:]
        if lowest or len(first) == wanted:
            last = first[-1][0] if first else score
            seen = sum(entry[0] == last for entry in first)
            yield from itertools.islice(self._downwards(last, 0), seen, None)

    def _estimate(self, highest: int, wanted: int) -> int:
        """Return a score above which the wanted entries probably are; 0 if all have to be looked through.

        Of a few buckets the highest scores are read: as many of all buckets have a higher one as their share is. Then
        few of the others have anything to tell, which takes a server a third of the time.
        """
        (name_of,) = self._indexes()
        place = (b"BYSCORE", b"REV", b"LIMIT", b"0", b"1", b"WITHSCORES")
        commands = [
            plain(b"ZRANGE", name_of(bucket), _top(highest), b"-inf", *place)
            for bucket in range(0, BUCKETS, _SAMPLED)
        ]
        scores = [int(float(s)) for told in exchange(self._link, commands) for _, s in pairs(told)]
        rank = 2 * wanted // _SAMPLED + 2
        return sorted(scores, reverse=True)[rank] if rank < len(scores) else 0

    def _downwards(self, highest: int, lowest: int) -> Iterator[tuple[int, bytes]]:
        """Merge the buckets between two scores; 0 stands for no bound."""
        (name_of,) = self._indexes()
        bounds = _top(highest), b"%d" % lowest if lowest else b"-inf"

        def entries(index: bytes, told: Reply) -> Iterator[tuple[int, bytes]]:
            at, size = 0, _AHEAD[0]
            while True:
                found = pairs(told)
                for name, score in found:
                    yield int(float(score)), name
                if len(found) < size:
                    return
                at, size = at + size, _AHEAD[1]
                place = (b"BYSCORE", b"REV", b"LIMIT", b"%d" % at, b"%d" % size, b"WITHSCORES")
                (told,) = exchange(self._link, [plain(b"ZRANGE", index, *bounds, *place)])

        indexes = [name_of(bucket) for bucket in range(BUCKETS)]
        found = ask_indexes(self._link, "newest", indexes, *bounds, b"%d" % _AHEAD[0])
        return heapq.merge(*(entries(*each) for each in found), key=lambda entry: -entry[0])

    def _records(self, names: Sequence[bytes]) -> Iterator[Record | None]:
        answers = exchange(self._link, [plain(b"GETRANGE", name, b"0", _SUMMARY) for name in names])
        for name, packed in zip(names, answers, strict=True):
            yield self._record(name, packed) if packed else None

    def _record(self, name: bytes, packed: bytes) -> Record | None:
        """Unpack a record only if its name and state are wanted: of thousands in a step, often none is."""
        identity, state = self._keys.identity(name), state_of(packed)
        if not self._selection.names(identity) or (state and state not in self._wanted):
            return None
        return unpack(identity, packed, summary=True).record

    def _is_named(self, name: bytes) -> bool:
        # The end first: of a million names, all are looked at for one key.
        return name.endswith(self._ends) and self._selection.names(self._keys.identity(name))

    def _take(self, record: Record | None) -> None:
        if self._includes(record):
            self._found.append(record)

    def _includes(self, record: Record | None) -> TypeGuard[Record]:
        return record is not None and self._selection.includes(record, self._now_ms)

    def _page(self, kind: str = "", *place: int) -> Page:
        return Page(
            records=tuple(self._found),
            cursor=write_cursor(kind, *place),
            looked_at=self._looked_at,
            now_ms=self._now_ms,
        )


def _top(highest: int) -> bytes:
    return b"%d" % highest if highest else b"+inf"
