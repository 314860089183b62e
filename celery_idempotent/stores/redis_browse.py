"""What operators see of Redis: live and failed records through indexes, others in steps of a scan, and counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from celery_idempotent.records import Counted, Page, Record, Selection, State, Stats
from celery_idempotent.stores.base import COUNTED_HOURS
from celery_idempotent.stores.channel import Link, exchange
from celery_idempotent.stores.keyspace import BUCKETS, Keyspace
from celery_idempotent.stores.packed import state_of, unpack
from celery_idempotent.stores.scripts import Command, plain

__all__ = ["browse", "count", "counts", "stats"]

#: So much of a record says all but its value, its message and its steps.
_HEAD = b"2047"

#: So many keys are read at once, or looked for by one step of a scan.
_STEP = 500

_HOUR_MS = 3_600_000

_INDEXED = frozenset({State.PROCESSING, State.QUEUED})


def browse(
    link: Link, keys: Keyspace, selection: Selection, *, cursor: str, limit: int, look_at: int
) -> Page:
    """Return about ``limit`` records from ``cursor`` on."""
    wanted = selection.wanted
    if wanted <= _INDEXED:
        return _Walk(link, keys, selection, limit).through(keys.leases, "l", cursor, look_at)
    if wanted == {State.FAILED}:
        return _Walk(link, keys, selection, limit).through(keys.failures, "f", cursor, look_at)
    return _Walk(link, keys, selection, limit).scan(cursor, look_at)


def stats(link: Link, keys: Keyspace) -> Stats:
    """Count what the indexes know."""
    now_ms = _now_ms(link)
    now = b"%d" % now_ms
    commands: list[Command] = []
    for bucket in range(BUCKETS):
        leases, failures = keys.leases(bucket), keys.failures(bucket)
        commands += (
            plain(bucket, b"ZCOUNT", leases, b"-inf", now),
            plain(bucket, b"ZCARD", leases),
            plain(bucket, b"ZCOUNT", failures, b"(" + now, b"+inf"),
        )
    answers = exchange(link, commands)
    stale, unsettled, failed = (sum(answers[n::3]) for n in range(3))
    return Stats(live=unsettled - stale, stale=stale, failed=failed, now_ms=now_ms)


def count(link: Link, keys: Keyspace, outcomes: Mapping[tuple[str, str], int]) -> None:
    """Add to the counters of this hour."""
    name = keys.counts(_now_ms(link) // _HOUR_MS)
    commands = [
        plain(0, b"HINCRBY", name, f"{outcome} {task}".encode(), b"%d" % number)
        for (task, outcome), number in outcomes.items()
    ]
    exchange(link, [*commands, plain(0, b"EXPIRE", name, b"%d" % (COUNTED_HOURS * 3600))])


def counts(link: Link, keys: Keyspace, *, hours: int) -> list[Counted]:
    """Return the counters of the last hours."""
    last = _now_ms(link) // _HOUR_MS
    wanted = range(last - min(hours, COUNTED_HOURS) + 1, last + 1)
    answers = exchange(link, [plain(0, b"HGETALL", keys.counts(hour)) for hour in wanted])
    found = []
    for hour, answer in zip(wanted, answers, strict=True):
        for field, number in zip(answer[::2], answer[1::2], strict=True):
            outcome, _, task = field.decode().partition(" ")
            found.append(Counted(hour=hour, task=task, outcome=outcome, count=int(number)))
    return sorted(found, key=lambda each: (each.hour, each.task, each.outcome))


class _Walk:
    """One page on its way: the records found so far, and how many keys that took."""

    def __init__(self, link: Link, keys: Keyspace, selection: Selection, limit: int) -> None:
        self._link = link
        self._keys = keys
        self._selection = selection
        self._wanted = selection.wanted
        self._limit = limit
        self._now_ms = _now_ms(link)
        self._found: list[Record] = []
        self._looked_at = 0

    def through(self, index: Callable[[int], bytes], kind: str, cursor: str, look_at: int) -> Page:
        """Walk through an index, bucket by bucket; the cursor says where in which."""
        start, skip = _read(cursor, kind, 2)
        for bucket, first, names in self._of_index(index, start, skip):
            for n in range(0, len(names), _STEP):
                step = names[n : n + _STEP]
                for at, record in enumerate(self._records([bucket] * len(step), step), start=1):
                    self._looked_at += 1
                    self._take(record)
                    if len(self._found) >= self._limit or self._looked_at >= look_at:
                        return self._page(f"{kind}:{bucket}:{first + n + at}")
        return self._page("")

    def scan(self, cursor: str, look_at: int) -> Page:
        """Go on with a scan; the cursor names the node, where its scan is, and how much of that step is done."""
        node, at, skip = _read(cursor, "s", 3)
        nodes = self._link.nodes()
        while node < len(nodes):
            words = (b"SCAN", b"%d" % at, b"MATCH", self._keys.pattern, b"COUNT", b"%d" % _STEP)
            ((after, names),) = exchange(self._link, (plain(nodes[node], *words),))
            step = names[skip:]
            buckets = [self._keys.bucket(name) for name in step]
            for n, record in enumerate(self._records(buckets, step), start=1):
                self._take(record)
                if len(self._found) >= self._limit and n < len(step):
                    self._looked_at += n
                    return self._page(f"s:{node}:{at}:{skip + n}")
            # A step looks at so many keys, also at those that are none of ours.
            self._looked_at += max(len(step), _STEP)
            at, skip = int(after), 0
            if not at:
                node += 1
            if len(self._found) >= self._limit or self._looked_at >= look_at:
                break
        return self._page(f"s:{node}:{at}:0" if node < len(nodes) else "")

    def _of_index(
        self, index: Callable[[int], bytes], start: int, skip: int
    ) -> Iterator[tuple[int, int, Sequence[bytes]]]:
        """Yield each bucket with names in its index, from which position on, and the names."""
        # Of no bucket more than a page can look at, and of few buckets at once: most are empty.
        for low in range(start, BUCKETS, 128):
            buckets = range(low, min(low + 128, BUCKETS))
            firsts = [skip if bucket == start else 0 for bucket in buckets]
            answers = exchange(
                self._link,
                [
                    plain(b, b"ZRANGE", index(b), b"%d" % first, b"%d" % (first + 4999))
                    for b, first in zip(buckets, firsts, strict=True)
                ],
            )
            for bucket, first, names in zip(buckets, firsts, answers, strict=True):
                if names:
                    yield bucket, first, names

    def _records(self, buckets: Sequence[int], names: Sequence[bytes]) -> Iterator[Record | None]:
        commands = [
            plain(bucket, b"GETRANGE", name, b"0", _HEAD)
            for bucket, name in zip(buckets, names, strict=True)
        ]
        answers: list[Any] = exchange(self._link, commands) if commands else []
        for name, packed in zip(names, answers, strict=True):
            yield self._record(name, packed) if packed else None

    def _record(self, name: bytes, packed: bytes) -> Record | None:
        """Take apart only what may be selected: of thousands that a step looks at, often none is."""
        identity, wanted = self._keys.identity(name), self._selection
        if wanted.namespace not in (None, identity.namespace):
            return None
        if wanted.scope not in (None, identity.scope):
            return None
        state = state_of(packed)
        if state is not None and state not in self._wanted:
            return None
        return unpack(identity, packed, summary=True)

    def _take(self, record: Record | None) -> None:
        if record is not None and self._selection.includes(record, self._now_ms):
            self._found.append(record)

    def _page(self, cursor: str) -> Page:
        return Page(
            records=tuple(self._found),
            cursor=cursor,
            looked_at=self._looked_at,
            now_ms=self._now_ms,
        )


def _read(cursor: str, kind: str, count: int) -> tuple[int, ...]:
    """Return the numbers of a cursor.

    Raises:
        ValueError: if it is none of this kind.
    """
    if not cursor:
        return (0,) * count
    word, *numbers = cursor.split(":")
    if word != kind or len(numbers) != count or not all(map(str.isdecimal, numbers)):
        raise ValueError("this cursor belongs to another list")
    return tuple(map(int, numbers))


def _now_ms(link: Link) -> int:
    ((seconds, micros),) = exchange(link, (plain(0, b"TIME"),))
    return int(seconds) * 1000 + int(micros) // 1000
