"""A store whose sweeps, lists and counts look at all its records: for few of them, or for tests.

A store of your own has three things to say, and has all verbs by that (docs/reference.md): how it looks at one key, how
it writes if nobody else has, and what records there are.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from celery_idempotent.records import Page, Record, Selection, State, Stats, SweepReport
from celery_idempotent.stores.deciding import DecidingStore, report

__all__ = ["ScanningStore"]


class ScanningStore(DecidingStore):
    """A store that decides in Python and can return all its records at once."""

    @abstractmethod
    def _alive(self) -> tuple[int, Sequence[Record]]:
        """Return the store's time, and the records that have not expired, in an order that stays."""

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue reservations whose message was not sent in time."""
        now_ms, records = self._alive()
        due = [record.identity for record in records if _may_be_swept(record, now_ms)]
        swept = [
            self._at(identity, lambda look: self._sweep(look, requeue_ms))
            for identity in due[:limit]
        ]
        return report([record for record in swept if record], more=len(due) > limit)

    def stats(self) -> Stats:
        """Count the records."""
        now_ms, records = self._alive()
        deadlines = [r.deadline_ms for r in records if r.deadline_ms is not None]
        stale = sum(deadline_ms <= now_ms for deadline_ms in deadlines)
        states = [record.state for record in records]
        return Stats(
            live=len(deadlines) - stale,
            stale=stale,
            interrupted=states.count(State.INTERRUPTED),
            failed=states.count(State.FAILED),
            now_ms=now_ms,
        )

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records; the cursor is how many came before."""
        if cursor and not cursor.isdecimal():
            raise ValueError("this cursor belongs to another list")
        now_ms, records = self._alive()
        if selection.newest_first:
            wanted = [record for record in records if record.state in selection.wanted]
            records = sorted(wanted, key=lambda record: record.updated_ms, reverse=True)
        found: list[Record] = []
        at = start = int(cursor or 0)
        while at < len(records) and at - start < look_at and len(found) < limit:
            if selection.includes(records[at], now_ms):
                found.append(replace(records[at], value=None, message=None, steps=()))
            at += 1
        return Page(
            records=tuple(found),
            cursor=str(at) if at < len(records) else "",
            looked_at=at - start,
            now_ms=now_ms,
        )


def _may_be_swept(record: Record, now_ms: int) -> bool:
    """Is this past its lease or deadline, and not a reservation that a sweep has no message of?"""
    past = record.deadline_ms is not None and record.deadline_ms <= now_ms
    return past and (record.state is State.PROCESSING or record.message is not None)
