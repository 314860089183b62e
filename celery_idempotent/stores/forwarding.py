"""A store before another: what it does not change, the other does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from celery_idempotent.records import (
    Answer,
    ClaimRequest,
    Counted,
    Identity,
    Page,
    Record,
    Renewal,
    Reservation,
    ReserveRequest,
    Selection,
    SettleRequest,
    State,
    Stats,
    Stored,
    SweepReport,
)
from celery_idempotent.stores.base import Store, Transaction

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["ForwardingStore"]


class ForwardingStore(Store):
    """Forwards every call to ``inner``, and can do what that can.

    Except standing behind a cache, and storing results: a subclass that settles in its own way would be passed by.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.supports_transactions = inner.supports_transactions
        self.supports_counting = inner.supports_counting
        self.outbox_alias = inner.outbox_alias

    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if nobody holds it."""
        return self.inner.claim(request)

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew."""
        return self.inner.renew(leases)

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, unless the key has another token by now."""
        return self.inner.settle(request)

    def reserve(self, request: ReserveRequest) -> Reservation:
        """Take the key for a message that is about to be published."""
        return self.inner.reserve(request)

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the result of a step."""
        return self.inner.checkpoint(identity, token=token, name=name, value=value)

    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled task were sent."""
        return self.inner.mark_delivered(identity, token=token)

    def release(
        self, identity: Identity, *, token: int, requeue_ms: int | None = None, note: str = ""
    ) -> bool:
        """Give the key back."""
        return self.inner.release(identity, token=token, requeue_ms=requeue_ms, note=note)

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner."""
        return self.inner.interrupt(identity, token=token)

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        return self.inner.get(identity)

    def requeue(
        self, identity: Identity, *, deadline_ms: int, token: int | None = None, note: str = ""
    ) -> Record | None:
        """Make an unfinished record that has a message QUEUED."""
        return self.inner.requeue(identity, deadline_ms=deadline_ms, token=token, note=note)

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt or requeue what is stale, requeue what nobody sent."""
        return self.inner.sweep(limit=limit, requeue_ms=requeue_ms)

    def prune(self, *, limit: int) -> int:
        """Delete records past their retention."""
        return self.inner.prune(limit=limit)

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record; with ``token`` and ``state`` only if it has these."""
        return self.inner.forget(identity, token=token, state=state)

    def stats(self) -> Stats:
        """Count the records."""
        return self.inner.stats()

    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records."""
        return self.inner.list(selection, cursor=cursor, limit=limit, look_at=look_at)

    def close(self) -> None:
        """Close the other's connections."""
        self.inner.close()

    def now_ms(self) -> int:
        """Return the time by the other's clock."""
        return self.inner.now_ms()

    def joined(self) -> bool:
        """Would a verb, here and now, become part of a transaction that the caller may still undo?"""
        return self.inner.joined()

    def transaction(self, record: Record | None) -> AbstractContextManager[Transaction]:
        """Begin the other's transaction."""
        return self.inner.transaction(record)

    def committed(self, record: Record) -> bool:
        """Tell whether the transaction that settled this claim was committed."""
        return self.inner.committed(record)

    def abandon(self, record: Record) -> None:
        """End the transaction of this claim, should an exception have left it open."""
        self.inner.abandon(record)

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:
        """Add to the counters of this hour."""
        self.inner.count(outcomes)

    def counts(self, *, hours: int) -> Sequence[Counted]:
        """Return the counters of the last hours."""
        return self.inner.counts(hours=hours)

    def note_sweep(self) -> None:
        """Note that a sweep ended just now."""
        self.inner.note_sweep()

    def upkeep(self, app: Celery, *, limit: int) -> dict[str, int]:
        """Look after what else the other holds for this app."""
        return self.inner.upkeep(app, limit=limit)

    def missing_bounds(self) -> Sequence[str]:
        """Return the options that would bound the waits for a server, and are not set."""
        return self.inner.missing_bounds()

    def missing_rights(self) -> Sequence[str]:
        """Return the commands that this user needs and may not run."""
        return self.inner.missing_rights()
