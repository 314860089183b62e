"""Lists of records in Redis, for operators: by the indexes or by a scan."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

from celery_idempotent.records import Page, Record, Selection, State
from celery_idempotent.stores.base import read_cursor, write_cursor
from celery_idempotent.stores.redis import format as layout
from celery_idempotent.stores.redis.servers import Link, Reply, exchange, pairs, plain

#: The last byte read of each record, before its value, message and steps, which may be megabytes. There may be an
#: operator's note of 600 characters and a task id that is no UUID, each character of up to 4 bytes.
_SUMMARY = b"3999"
#: The number of keys that one trip reads, or one step of a scan looks for, at most.
_STEP = 500
#: The number of names that are read of each index at first, and then of one that has more.
_FIRST, _MORE = 16, 64
_INDEXES = {State.FAILED: layout.FAILURES, State.INTERRUPTED: layout.INTERRUPTED}


class Search:
    """The search for one page: the records found so far, and how many keys it has looked at."""

    def __init__(
        self, link: Link, keys: layout.Keyspace, selection: Selection, *, limit: int, now_ms: int
    ) -> None:
        self._link, self._keys, self._selection = link, keys, selection
        self._limit, self._now_ms = limit, now_ms
        self._ends = tuple(f":{key}".encode() for key in selection.keys) or (b"",)
        self._found: list[Record] = []
        self._looked_at = 0

    def walk(self, cursor: str, look_at: int) -> Page:
        """Merge the indexes of all buckets, highest scores first; the cursor is a score, and how many had it."""
        wanted = self._selection.wanted
        kinds = [index for state, index in _INDEXES.items() if state in wanted]
        if not wanted <= _INDEXES.keys():
            kinds.append(layout.LEASES)
        kind = b"".join(kinds).decode()
        score, same = read_cursor(cursor, kind, 2)
        entries = itertools.islice(self._entries(kinds, score), same, None)
        while self._looked_at < look_at and len(self._found) < self._limit:
            # The first step usually fills the page; the steps after that are larger.
            most = min(_STEP if self._looked_at else self._limit, look_at - self._looked_at)
            step = list(itertools.islice(entries, most))
            if not step:
                return self._page()
            records = self._wanted([name for _, name in step])
            for at, name in step:
                self._looked_at += 1
                score, same = at, same + 1 if at == score else 1
                if name in records:
                    self._found.append(records[name])
                if len(self._found) >= self._limit:
                    break
        return self._page(kind, score, same)

    def scan(self, cursor: str, look_at: int) -> Page:
        """Scan all keys; the cursor is a node, and the cursor of its ``SCAN``.

        A page ends between two steps, for a step that is repeated may give other keys, or give them in another order.
        """
        number, at = read_cursor(cursor, "s", 2)
        count, nodes = min(self._limit, _STEP), self._link.nodes()
        while number < len(nodes) and len(self._found) < self._limit and self._looked_at < look_at:
            step = (b"SCAN", b"%d" % at, b"MATCH", self._keys.pattern, b"COUNT", b"%d" % count)
            ((after, names),) = exchange(self._link, [plain(*step, node=nodes[number])])
            # A step looks at about so many keys, those of other applications included.
            self._looked_at += max(len(names), count)
            found, room = self._wanted(names).values(), self._limit - len(self._found)
            if len(found) > room and (self._found or count > 1):
                if self._found:
                    break  # the next page has them
                count //= 2
                continue
            self._found += found
            if 4 * len(found) < room:
                count = min(2 * count, _STEP)
            # redis-py's client of a Cluster has the cursor of each node.
            (at,) = map(int, after.values() if isinstance(after, dict) else (after,))
            number += not at
        return self._page("s", number, at) if number < len(nodes) else self._page()

    def _entries(self, kinds: Sequence[bytes], highest: int) -> Iterator[tuple[int, bytes]]:
        """Yield scores and names of all indexes, downwards from a score (0: from the highest)."""
        indexes = [index for kind in kinds for index in self._keys.index(kind)]
        start = b"%d" % highest if highest else b"+inf"
        how = start, b"-inf", b"BYSCORE", b"REV", b"WITHSCORES", b"LIMIT"

        def ask(some: Sequence[bytes], at: int, size: int) -> list[Reply]:
            place = b"%d" % at, b"%d" % size
            return exchange(self._link, [plain(b"ZRANGE", index, *how, *place) for index in some])

        def entries(index: bytes, answer: Reply) -> Iterator[tuple[int, bytes]]:
            at, size = 0, _FIRST
            while True:
                found = pairs(answer)
                for name, score in found:
                    if name != layout.MARK:
                        yield int(float(score)), name
                if len(found) < size:
                    return
                at, size = at + size, _MORE
                (answer,) = ask([index], at, size)

        answers = zip(indexes, ask(indexes, 0, _FIRST), strict=True)
        return heapq.merge(*(entries(*each) for each in answers if each[1]), key=lambda e: -e[0])

    def _wanted(self, names: Sequence[bytes]) -> dict[bytes, Record]:
        """Read the records with these names; return those that are wanted, often none of thousands."""
        named = [name for name in names if self._is_named(name)]
        reads = [plain(b"GETRANGE", name, b"0", _SUMMARY) for name in named]
        found: dict[bytes, Record] = {}
        for name, packed in zip(named, exchange(self._link, reads), strict=True):
            if packed:
                record = layout.unpack(self._keys.identity(name), packed, summary=True).record
                if self._selection.includes(record, self._now_ms):
                    found[name] = record
        return found

    def _is_named(self, name: bytes) -> bool:
        # The end first, which is fast: a search for one key looks at a million names.
        return name.endswith(self._ends) and self._selection.names(self._keys.identity(name))

    def _page(self, kind: str = "", *place: int) -> Page:
        records, cursor = tuple(self._found), write_cursor(kind, *place)
        return Page(records=records, cursor=cursor, looked_at=self._looked_at, now_ms=self._now_ms)
