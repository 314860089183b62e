"""What a store must do: one verb a method, one atomic step a verb."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from celery_idempotent.records import Answer, Identity, Lease, Record, State, Stored, SweepReport

__all__ = ["ATTEMPT_BYTES", "Store"]

#: The length of an attempt id, the random bytes that make a repeated claim answer as the first one did.
ATTEMPT_BYTES = 8


@runtime_checkable
class Store(Protocol):
    """Keeps the records.

    Time is the store's own clock, never the caller's. Every verb may be repeated when its answer was lost, and then
    answers as it did the first time. Every write after the claim carries the record's token and does nothing for any
    other. Expected outcomes are return values; every verb may raise :exc:`~celery_idempotent.errors.StoreUnavailable`
    (trying again may help) or :exc:`~celery_idempotent.errors.StoreMisconfigured` (it will not). All times are
    milliseconds. ``celery_idempotent.testing.StoreContract`` holds a store to all of this.
    """

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
        """Take the key if nobody holds it.

        ``attempt`` (:data:`ATTEMPT_BYTES` random bytes, new for every claim) lets a claim whose answer was lost be
        repeated: while that claim holds, the same attempt gets the same token again. The lease lasts ``lease_ms``; the
        record lives ``keep_ms`` longer, so that there is something to sweep and a crash to count. A fingerprint that
        either side lacks is equal to any. Claiming a PROCESSING record whose lease ran out counts a crash.
        """
        ...

    def renew(self, leases: Sequence[Lease]) -> list[bool]:
        """Let each lease start anew; ``False`` for each that is no longer held with that token."""
        ...

    def settle(
        self,
        record: Record,
        *,
        state: Literal[State.COMPLETED, State.FAILED],
        value: Stored | None,
        keep_ms: int,
        replaced: bool = False,
    ) -> bool:
        """Write the end state and keep it for ``keep_ms``; ``False`` if the key has another token by now.

        ``record`` is the one that the claim returned. Accepted whether or not the lease ran out, also when the record
        is gone (flushed, evicted), and when the claim was settled before: then the first end stays.
        """
        ...

    def release(self, identity: Identity, *, token: int) -> bool:
        """Give the key back: delete the PROCESSING record with this token. ``False`` if there was none."""
        ...

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner of the PROCESSING record with this token.

        It becomes INTERRUPTED, claimable, with one crash more, for as long as it would have lived. Returns the record
        as it is now, ``None`` if no PROCESSING record has this token (any more, when the answer was lost).
        """
        ...

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        ...

    def sweep(self, *, limit: int) -> SweepReport:
        """Interrupt up to about ``limit`` PROCESSING records whose lease ran out, found through an index of leases.

        Whether a record is stale is decided again at the moment of the write, so any number of sweeps may run at once.
        """
        ...

    def prune(self, *, limit: int) -> int:
        """Delete up to about ``limit`` records (or index entries) past their retention; return how many."""
        ...

    def forget(self, identity: Identity) -> bool:
        """Delete the record whatever its state. ``False`` if there was none. Later claims still get a larger token."""
        ...

    def close(self) -> None:
        """Close connections; the store may be used again afterwards."""
        ...
