"""Records in the memory of one process, for tests and eager mode."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from celery_idempotent.records import (
    Answer,
    Claimed,
    Held,
    Identity,
    Lease,
    Mismatched,
    Record,
    Settled,
    State,
    Stored,
    SweepReport,
)

__all__ = ["MemoryStore"]


@dataclass(frozen=True, slots=True)
class _Kept:
    record: Record
    expires_ms: int
    attempt: bytes = b""


class MemoryStore:
    """Keeps the records of one process; a forked child goes on with a copy of its own.

    ``clock`` gives the time in microseconds since the epoch; see
    :class:`celery_idempotent.testing.FakeClock`.
    """

    def __init__(self, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock or _wall_clock_us
        self._kept: dict[Identity, _Kept] = {}
        self._highest_token = 0
        # Reentrant, because a signal handler may call the store while its thread is inside it.
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<MemoryStore: {len(self._kept)} records>"

    def claim(
        self,
        identity: Identity,
        *,
        attempt: bytes,
        lease_ms: int,
        keep_ms: int,
        fingerprint: bytes | None = None,
        task_id: str = "",
        worker: str = "",
    ) -> Answer:
        """Take the key if nobody holds it."""
        with self._locked():
            now_us = self._clock()
            now = now_us // 1000
            kept = self._find(identity, now)
            new = Record(
                identity=identity,
                state=State.PROCESSING,
                token=0,
                created_ms=now,
                updated_ms=now,
                deadline_ms=now + lease_ms,
                fingerprint=fingerprint,
                task_id=task_id,
                worker=worker,
            )
            if kept is not None:
                answer = _refusal(kept, new, attempt, now)
                if answer is not None:
                    return answer
                new = _successor(kept, new, attempt)
            if not new.token:
                self._highest_token = max(self._highest_token + 1, now_us)
                new = replace(new, token=self._highest_token)
            self._kept[identity] = _Kept(new, now + lease_ms + keep_ms, attempt)
            return Claimed(new)

    def renew(self, leases: Sequence[Lease]) -> list[bool]:
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
                record = replace(
                    record, crashes=kept.record.crashes, created_ms=kept.record.created_ms
                )
            settled = replace(
                record,
                state=state,
                updated_ms=now,
                deadline_ms=None,
                worker="",
                value=value,
                replaced=replaced,
            )
            self._kept[record.identity] = _Kept(settled, now + max(keep_ms, 1))
            return True

    def release(self, identity: Identity, *, token: int) -> bool:
        """Give the key back."""
        with self._locked():
            kept = self._processing(identity, token)
            if kept is None:
                return False
            del self._kept[identity]
            return True

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner."""
        with self._locked():
            kept = self._processing(identity, token)
            return None if kept is None else self._interrupt(kept)

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        with self._locked():
            kept = self._find(identity, self._clock() // 1000)
            return None if kept is None else kept.record

    def sweep(self, *, limit: int) -> SweepReport:
        """Interrupt what is stale."""
        with self._locked():
            now = self._clock() // 1000
            alive = [kept for kept in self._kept.values() if kept.expires_ms > now]
            stale = [kept for kept in alive if kept.record.stale(now)]
            swept = tuple(self._interrupt(kept) for kept in stale[:limit])
            return SweepReport(interrupted=swept, more=len(stale) > limit)

    def prune(self, *, limit: int) -> int:
        """Delete records past their retention."""
        with self._locked():
            now = self._clock() // 1000
            past = [identity for identity, kept in self._kept.items() if kept.expires_ms <= now]
            for identity in past[:limit]:
                del self._kept[identity]
            return len(past[:limit])

    def forget(self, identity: Identity) -> bool:
        """Delete the record whatever its state."""
        with self._locked():
            kept = self._find(identity, self._clock() // 1000)
            self._kept.pop(identity, None)
            return kept is not None

    def close(self) -> None:
        """Keep everything: there is nothing to close."""

    def _locked(self) -> threading.RLock:
        # Another thread may have held the parent's lock at the moment of the fork; in the child
        # nobody would free it.
        if self._pid != os.getpid():
            self._lock = threading.RLock()
            self._pid = os.getpid()
        return self._lock

    def _find(self, identity: Identity, now_ms: int) -> _Kept | None:
        kept = self._kept.get(identity)
        return kept if kept is not None and kept.expires_ms > now_ms else None

    def _processing(self, identity: Identity, token: int) -> _Kept | None:
        kept = self._find(identity, self._clock() // 1000)
        if kept is None or kept.record.state is not State.PROCESSING or kept.record.token != token:
            return None
        return kept

    def _renew(self, lease: Lease) -> bool:
        kept = self._processing(lease.identity, lease.token)
        if kept is None:
            return False
        deadline_ms = self._clock() // 1000 + lease.lease_ms
        renewed = replace(kept.record, deadline_ms=deadline_ms)
        self._kept[lease.identity] = _Kept(renewed, deadline_ms + lease.keep_ms, kept.attempt)
        return True

    def _interrupt(self, kept: _Kept) -> Record:
        record = replace(
            kept.record,
            state=State.INTERRUPTED,
            crashes=kept.record.crashes + 1,
            updated_ms=self._clock() // 1000,
            deadline_ms=None,
        )
        self._kept[record.identity] = _Kept(record, kept.expires_ms, kept.attempt)
        return record


def _refusal(kept: _Kept, new: Record, attempt: bytes, now_ms: int) -> Answer | None:
    """Return why the claim cannot have the key, ``None`` if it can."""
    old = kept.record
    known, given = old.fingerprint, new.fingerprint
    if known is not None and given is not None and known != given:
        return Mismatched(old)
    if old.state.settled:
        return Settled(old, age_ms=max(now_ms - old.updated_ms, 0))
    if old.state is State.PROCESSING and old.deadline_ms is not None and kept.attempt != attempt:
        left_ms = old.deadline_ms - now_ms
        if left_ms > 0:
            return Held(old, left_ms=left_ms)
    return None


def _successor(kept: _Kept, new: Record, attempt: bytes) -> Record:
    """Return the claim with what it takes over from the old record, its token only if it holds."""
    old = kept.record
    if old.state is State.PROCESSING and kept.attempt == attempt:
        return replace(old, deadline_ms=new.deadline_ms)
    return replace(
        new,
        created_ms=old.created_ms,
        crashes=old.crashes + (old.state is State.PROCESSING),
        attempts=old.attempts + 1,
        fingerprint=new.fingerprint if new.fingerprint is not None else old.fingerprint,
    )


def _wall_clock_us() -> int:
    return time.time_ns() // 1000
