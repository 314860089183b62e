"""Records in the memory of one process, for tests and eager mode."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

from celery_idempotent.records import (
    Answer,
    Claimed,
    ClaimRequest,
    Counted,
    Held,
    Identity,
    Mismatched,
    Page,
    Record,
    RefusalKind,
    Renewal,
    Reservation,
    Reserved,
    Retained,
    Selection,
    Settled,
    State,
    Stats,
    Stored,
    SweepReport,
)
from celery_idempotent.stores import transitions
from celery_idempotent.stores.base import COUNTED_HOURS
from celery_idempotent.stores.transitions import Kept

__all__ = ["MemoryStore"]

HOUR_US = 3_600_000_000


class MemoryStore:
    """Keeps the records of one process; a forked child goes on with a copy of its own.

    ``clock`` gives the time in microseconds since the epoch; see
    :class:`celery_idempotent.testing.FakeClock`.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock or _wall_clock_us
        self._kept: dict[Identity, Kept] = {}
        self._counts: Counter[tuple[int, str, str]] = Counter()
        self._highest_token = 0
        self._swept_ms: int | None = None
        # Reentrant, because a signal handler may call the store while its thread is inside it.
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<MemoryStore: {len(self._kept)} records>"

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if nobody holds it."""
        with self._locked():
            now_us = self._clock()
            now = now_us // 1000
            kept = self._find(request.identity, now)
            new = Record(
                identity=request.identity,
                state=State.PROCESSING,
                token=0,
                created_ms=now,
                updated_ms=now,
                deadline_ms=now + request.lease_ms,
                fingerprint=request.fingerprint,
                task_id=request.task_id,
                worker=request.worker,
                on_stale=request.on_stale,
                message=request.message,
            )
            taken = transitions.claimed(kept, new, request.attempt, now, request.unanswered)
            if not isinstance(taken, Record):
                if kept is not None and not isinstance(taken, Settled):
                    self._refuse(kept, taken, request.task_id, now)
                return taken
            life_ms = request.lease_ms + request.keep_ms
            return Claimed(self._take(kept, taken, request.attempt, now_us, life_ms))

    def reserve(
        self,
        identity: Identity,
        *,
        task_id: str,
        deadline_ms: int,
        keep_ms: int,
        fingerprint: bytes | None = None,
        message: bytes | None = None,
    ) -> Reservation:
        """Take the key for a message that is about to be published."""
        # Tells who reserves also where the record keeps another's task id; equal to no attempt of
        # a claim.
        attempt = b"reserved by " + task_id.encode()
        with self._locked():
            now_us = self._clock()
            now = now_us // 1000
            kept = self._find(identity, now)
            new = Record(
                identity=identity,
                state=State.QUEUED,
                token=0,
                created_ms=now,
                updated_ms=now,
                deadline_ms=now + deadline_ms,
                attempts=0,
                fingerprint=fingerprint,
                task_id=task_id,
                reserved=True,
                message=message,
            )
            taken = transitions.reserved(kept, new, attempt, now)
            if not isinstance(taken, Record):
                if kept is not None and isinstance(taken, Mismatched):
                    self._refuse(kept, taken, task_id, now)
                return taken
            return Reserved(self._take(kept, taken, attempt, now_us, deadline_ms + keep_ms))

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew."""
        with self._locked():
            return [self._renew(lease) for lease in leases]

    def settle(
        self,
        record: Record,
        *,
        state: Literal[State.COMPLETED, State.FAILED],
        value: Stored | None,
        keep_ms: int,
        replaced: bool = False,
        restore: bool = True,
    ) -> bool:
        """Write the end state, unless the key has another token by now."""
        with self._locked():
            now = self._clock() // 1000
            kept = self._find(record.identity, now)
            if kept is not None:
                if kept.record.token != record.token:
                    return False
                if kept.record.state.settled:
                    return True
            elif not restore:
                return False
            end = transitions.settled(
                record, kept, state=state, value=value, replaced=replaced, now_ms=now
            )
            refusals = kept.refusals if kept is not None else ()
            self._kept[record.identity] = Kept(end, now + max(keep_ms, 1), refusals=refusals)
            return True

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the result of a step."""
        with self._locked():
            kept = self._held(identity, token)
            if kept is None:
                return False
            record = transitions.add_step(kept.record, name, value)
            self._kept[identity] = replace(kept, record=record)
            return True

    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled task were sent."""
        with self._locked():
            kept = self._held(identity, token, State.COMPLETED, State.FAILED)
            if kept is None:
                return False
            self._kept[identity] = replace(kept, record=replace(kept.record, delivered=True))
            return True

    def release(self, identity: Identity, *, token: int, requeue_ms: int | None = None) -> bool:
        """Give the key back."""
        with self._locked():
            kept = self._held(identity, token, State.PROCESSING, State.QUEUED)
            if kept is None:
                return False
            after = transitions.given_back(kept, requeue_ms, self._clock() // 1000)
            if after is None:
                del self._kept[identity]
            else:
                self._kept[identity] = after
            return True

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner."""
        with self._locked():
            kept = self._held(identity, token)
            if kept is None:
                return None
            return self._put(transitions.interrupted(kept, self._clock() // 1000))

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        with self._locked():
            kept = self._find(identity, self._clock() // 1000)
            return None if kept is None else replace(kept.record, refusals=kept.refusals)

    def retained(self, identity: Identity) -> Retained | None:
        """Return the settled record, and for how long it is kept."""
        with self._locked():
            now = self._clock() // 1000
            kept = self._find(identity, now)
            if kept is None or not kept.record.state.settled:
                return None
            age_ms = max(now - kept.record.updated_ms, 0)
            return Retained(kept.record, age_ms=age_ms, left_ms=kept.expires_ms - now)

    def joined(self) -> bool:
        """Nothing here is undone: there are no transactions."""
        return False

    def requeue(
        self, identity: Identity, *, deadline_ms: int, token: int | None = None
    ) -> Record | None:
        """Make an unfinished record that has a message QUEUED."""
        with self._locked():
            now = self._clock() // 1000
            kept = self._find(identity, now)
            if kept is None or not transitions.may_requeue(kept.record, token, now):
                return None
            after = transitions.requeued(kept, deadline_ms, now)
            return None if after is None else self._put(after)

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue reservations whose message was not sent in time."""
        with self._locked():
            now = self._clock() // 1000
            due = [
                after
                for kept in self._kept.values()
                if kept.expires_ms > now and _due(kept.record, now)
                if (after := transitions.swept(kept, requeue_ms, now)) is not None
            ]
            records = [self._put(after) for after in due[:limit]]
            return SweepReport(
                interrupted=tuple(r for r in records if r.state is State.INTERRUPTED),
                requeued=tuple(r for r in records if r.state is State.QUEUED),
                more=len(due) > limit,
            )

    def prune(self, *, limit: int) -> int:
        """Delete records past their retention."""
        with self._locked():
            now = self._clock() // 1000
            past = [identity for identity, kept in self._kept.items() if kept.expires_ms <= now]
            for identity in past[:limit]:
                del self._kept[identity]
            return len(past[:limit])

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record; with ``token`` and ``state`` only if it has these."""
        with self._locked():
            kept = self._find(identity, self._clock() // 1000)
            if kept is None or token not in (None, kept.record.token):
                return False
            if state not in (None, kept.record.state):
                return False
            del self._kept[identity]
            return True

    def stats(self) -> Stats:
        """Count the records."""
        with self._locked():
            now = self._clock() // 1000
            records = [kept.record for kept in self._kept.values() if kept.expires_ms > now]
            due = [_due(record, now) for record in records if record.deadline_ms is not None]
            return Stats(
                live=len(due) - sum(due),
                stale=sum(due),
                interrupted=sum(record.state is State.INTERRUPTED for record in records),
                failed=sum(record.state is State.FAILED for record in records),
                now_ms=now,
                swept_ms=self._swept_ms,
            )

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records; the cursor is how many came before."""
        if cursor and not cursor.isdecimal():
            raise ValueError("this cursor belongs to another list")
        with self._locked():
            now, start = self._clock() // 1000, int(cursor or 0)
            records = [kept.record for kept in self._kept.values() if kept.expires_ms > now]
            if selection.newest_first:
                records = [record for record in records if record.state in selection.wanted]
                records.sort(key=lambda record: record.updated_ms, reverse=True)
            found: list[Record] = []
            at = start
            while at < len(records) and at - start < look_at and len(found) < limit:
                if selection.includes(records[at], now):
                    found.append(replace(records[at], value=None, message=None, steps=()))
                at += 1
            return Page(
                records=tuple(found),
                cursor=str(at) if at < len(records) else "",
                looked_at=at - start,
                now_ms=now,
            )

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        """Add to the counters of this hour."""
        with self._locked():
            hour = self._clock() // HOUR_US
            for (task, outcome), count in outcomes.items():
                self._counts[hour, task, outcome] += count
            for key in [key for key in self._counts if key[0] <= hour - COUNTED_HOURS]:
                del self._counts[key]

    def counts(self, *, hours: int) -> Sequence[Counted]:
        """Return the counters of the last hours."""
        with self._locked():
            first = self._clock() // HOUR_US - min(hours, COUNTED_HOURS) + 1
            return [
                Counted(hour=hour, task=task, outcome=outcome, count=count)
                for (hour, task, outcome), count in sorted(self._counts.items())
                if hour >= first
            ]

    def note_sweep(self) -> None:
        """Note that a sweep ended just now."""
        with self._locked():
            self._swept_ms = self._clock() // 1000

    def close(self) -> None:
        """Keep everything: there is nothing to close."""

    def _locked(self) -> threading.RLock:
        # Another thread may have held the parent's lock at the moment of the fork; in the child
        # nobody would free it.
        if self._pid != os.getpid():
            self._lock = threading.RLock()
            self._pid = os.getpid()
        return self._lock

    def _find(self, identity: Identity, now_ms: int) -> Kept | None:
        kept = self._kept.get(identity)
        return kept if kept is not None and kept.expires_ms > now_ms else None

    def _held(self, identity: Identity, token: int, *states: State) -> Kept | None:
        """Return what is kept if it has this token and one of the states, PROCESSING by default."""
        kept = self._find(identity, self._clock() // 1000)
        if kept is None or kept.record.token != token:
            return None
        return kept if kept.record.state in (states or (State.PROCESSING,)) else None

    def _take(
        self, kept: Kept | None, new: Record, attempt: bytes, now_us: int, life_ms: int
    ) -> Record:
        """Keep a claim or a reservation, with the next token unless it has one."""
        if not new.token:
            self._highest_token = max(self._highest_token + 1, now_us)
            new = replace(new, token=self._highest_token)
        expires_ms = now_us // 1000 + life_ms
        if kept is None:
            return self._put(Kept(new, expires_ms, attempt))
        return self._put(replace(kept, record=new, expires_ms=expires_ms, attempt=attempt))

    def _refuse(self, kept: Kept, answer: Held | Mismatched, task_id: str, now_ms: int) -> None:
        kind: RefusalKind = "conflict" if isinstance(answer, Held) else "mismatch"
        self._put(transitions.refused(kept, kind, task_id, now_ms))

    def _put(self, kept: Kept) -> Record:
        self._kept[kept.record.identity] = kept
        return kept.record

    def _renew(self, lease: Renewal) -> bool:
        kept = self._held(lease.identity, lease.token)
        if kept is None:
            return False
        deadline_ms = self._clock() // 1000 + lease.lease_ms
        renewed = replace(kept.record, deadline_ms=deadline_ms)
        self._put(replace(kept, record=renewed, expires_ms=deadline_ms + lease.keep_ms))
        return True


def _due(record: Record, now_ms: int) -> bool:
    """Is this an unfinished record whose lease or deadline is past?"""
    return record.deadline_ms is not None and record.deadline_ms <= now_ms


def _wall_clock_us() -> int:
    return time.time_ns() // 1000
