"""One look at a record, and the swap that writes over it unless somebody else has."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TypeAlias

from celery_idempotent.records import Identity, State
from celery_idempotent.stores.deciding import Look, StoredRecord
from celery_idempotent.stores.redis.format import HEAD, pack, unpack
from celery_idempotent.stores.redis.servers import Reply

#: Runs the script swap with these arguments, or plans to; returns its answer.
Swap: TypeAlias = Callable[[Identity, tuple[bytes, ...]], Reply]

#: Which of swap's keys indexes the records of a state.
_LEASES = b"2"
_INDEX = {
    State.PROCESSING: _LEASES,
    State.QUEUED: _LEASES,
    State.FAILED: b"3",
    State.INTERRUPTED: b"4",
}


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
        enters = _INDEX.get(record.state)
        score = after.expires_ms if record.deadline_ms is None else record.deadline_ms
        # A lost record left its entry behind.
        leaves = _LEASES if before is None else _INDEX.get(before.record.state)
        self._write(
            pack(after, os.urandom(4)),
            life,
            b"%d" % record.token if is_new else b"",
            enters,
            score,
            leaves if leaves != enters else None,
        )

    def remove(self, *, forget: bool) -> None:  # noqa: ARG002
        """Delete what the look found."""
        assert self.stored is not None
        self._write(b"", b"", b"", None, 0, _INDEX.get(self.stored.record.state))

    def mend(self) -> None:
        """Take a record that no sweep has to look at out of the index of leases, or put it where it belongs."""
        record = self.stored and self.stored.record
        if record and record.deadline_ms and record.deadline_ms > self.now_us // 1000:
            self._write(self.packed, b"", b"", _LEASES, record.deadline_ms, None)
        else:
            self._write(self.packed, b"", b"", None, 0, _LEASES)

    def _write(
        self,
        packed: bytes,
        life: bytes,
        token: bytes,
        enters: bytes | None,
        score: int,
        leaves: bytes | None,
    ) -> None:
        """Write, unless somebody else did."""
        seen = self.packed[: HEAD.size]
        done = self._swap(
            self.identity, (seen, packed, life, token, enters or b"", b"%d" % score, leaves or b"")
        )
        if done != 1:
            raise ChangedError(int(done))
