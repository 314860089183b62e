"""Records in the memory of one process, for tests and eager mode."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from celery_idempotent.records import Counted, Identity, Page, Record, Selection, State, Stats
from celery_idempotent.stores.base import PERIODS, Period, Store, read_cursor, write_cursor
from celery_idempotent.stores.table import Snapshot, StoredRecord

__all__ = ["MemoryStore"]

T = TypeVar("T")


class MemorySnapshot(Snapshot):
    """What one look found; nobody writes before it is over."""

    def __init__(self, store: MemoryStore, stored: StoredRecord | None, now_us: int) -> None:
        self.stored, self.now_us, self.highest = stored, now_us, store.highest_token
        self._store = store

    def write(self, after: StoredRecord) -> None:
        self._store.highest_token = max(self.highest, after.record.token)
        self._store.records[after.record.identity] = after

    def remove(self, *, forget: bool) -> None:  # noqa: ARG002
        assert self.stored is not None
        del self._store.records[self.stored.record.identity]


class MemoryStore(Store):
    """The records of one process; ``clock`` gives microseconds since the epoch, as a ``FakeClock`` does."""

    supports_counting = True

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock or (lambda: time.time_ns() // 1000)
        self.records: dict[Identity, StoredRecord] = {}
        self._counted: Counter[tuple[Period, int, str, str]] = Counter()
        self.highest_token = 0
        self._swept_ms: int | None = None
        # Reentrant, because a signal handler may call the store while its thread is inside it.
        self._lock = threading.RLock()

    def __repr__(self) -> str:
        return f"<MemoryStore: {len(self.records)} records>"

    def _at(self, identity: Identity, verb: Callable[[Snapshot], T]) -> T:
        with self._lock:
            now_us = self._clock()
            stored = self.records.get(identity)
            if stored is not None and stored.expires_ms <= now_us // 1000:
                stored = None
            return verb(MemorySnapshot(self, stored, now_us))

    def now_ms(self) -> int:
        return self._clock() // 1000

    def _due(self, limit: int) -> Sequence[Identity]:
        now_ms, records = self._alive()
        past = [r for r in records if r.deadline_ms is not None and r.deadline_ms <= now_ms]
        # Of a reservation without a message a sweep has nothing to send.
        due = [r.identity for r in past if r.state is State.PROCESSING or r.message is not None]
        return due[:limit]

    def prune(self, *, limit: int) -> int:
        with self._lock:
            now_ms = self.now_ms()
            past = [name for name, stored in self.records.items() if stored.expires_ms <= now_ms]
            for identity in past[:limit]:
                del self.records[identity]
        return len(past[:limit])

    def stats(self) -> Stats:
        now_ms, records = self._alive()
        deadlines = [r.deadline_ms for r in records if r.deadline_ms is not None]
        stale, states = sum(each <= now_ms for each in deadlines), [r.state for r in records]
        return Stats(
            live=len(deadlines) - stale,
            stale=stale,
            interrupted=states.count(State.INTERRUPTED),
            failed=states.count(State.FAILED),
            queued=states.count(State.QUEUED),
            now_ms=now_ms,
            swept_ms=self._swept_ms,
        )

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        (start,) = read_cursor(cursor, "m", 1)
        now_ms, records = self._alive()
        if not selection.scans:
            wanted = [record for record in records if record.state in selection.wanted]
            records = sorted(wanted, key=lambda record: record.updated_ms, reverse=True)
        found: list[Record] = []
        at = start
        while at < min(len(records), start + look_at) and len(found) < limit:
            if selection.includes(records[at], now_ms):
                found.append(replace(records[at], value=None, message=None, steps=()))
            at += 1
        cursor = write_cursor("m", at) if at < len(records) else ""
        return Page(records=tuple(found), cursor=cursor, looked_at=at - start, now_ms=now_ms)

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        with self._lock:
            now_ms = self.now_ms()
            for each in PERIODS:
                start_ms = each.start(now_ms)
                self._counted.update({(each, start_ms, *key): n for key, n in outcomes.items()})
            for key in [
                key for key in self._counted if key[1] <= key[0].start(now_ms, key[0].kept)
            ]:
                del self._counted[key]

    def _counts(self, period: Period, starts: Sequence[int]) -> Sequence[Counted]:
        with self._lock:
            return [
                Counted(start_ms=start_ms, task=task, outcome=outcome, count=count)
                for (length, start_ms, task, outcome), count in sorted(self._counted.items())
                if length == period and start_ms in starts
            ]

    def note_sweep(self) -> None:
        self._swept_ms = self.now_ms()

    def _alive(self) -> tuple[int, Sequence[Record]]:
        """Return the time, and the records that have not expired."""
        with self._lock:
            now_ms, stored = self.now_ms(), self.records.values()
            return now_ms, [each.record for each in stored if each.expires_ms > now_ms]
