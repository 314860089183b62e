"""What a store must do: one verb a method, one atomic step a verb."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
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
    ResultWrite,
    Selection,
    SettledWith,
    SettleRequest,
    State,
    Stats,
    Stored,
    SweepReport,
)
from celery_idempotent.stores.transactions import Transaction

if TYPE_CHECKING:
    from celery import Celery
    from redis import ConnectionPool

__all__ = ["ATTEMPT_BYTES", "COUNTED_HOURS", "ServerFacts", "Store", "Transaction"]

#: The length of an attempt id, the random bytes that make a repeated claim answer as the first one did.
ATTEMPT_BYTES = 8

#: For how many hours a store has its counters.
COUNTED_HOURS = 30 * 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server of a store, and how it is set up.

    ``persistent`` is ``None`` where the server does not say whether it saves snapshots.
    """

    kind: str
    version: str
    eviction: str
    persistent: bool | None

    @property
    def release(self) -> tuple[int, ...]:
        """The version as numbers, for comparing."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])


class Store(ABC):
    """Holds the records: a store of your own is a subclass with every abstract method, the verbs.

    What a store may do beyond the verbs has a default here, that of a store which cannot; a flag says what it can.

    Time is the store's own clock, never the caller's. Every verb may be repeated when its answer was lost, and then
    answers as it did the first time. Every write after the claim carries the record's token and does nothing for any
    other. Expected outcomes are return values; every verb may raise :exc:`~celery_idempotent.errors.StoreUnavailable`
    (trying again may help) or :exc:`~celery_idempotent.errors.StoreMisconfigured` (it will not). All times are
    milliseconds. ``tests/contract`` holds a store to all of this.
    """

    #: Can a run be part of its transactions? Then it has `transaction`, `committed` and `abandon`.
    supports_transactions: bool = False
    #: Does it count outcomes for operators? Then it has `count`, `counts` and `note_sweep`.
    supports_counting: bool = False
    #: The Django database whose outbox `upkeep` sweeps.
    outbox_alias: str | None = None

    @abstractmethod
    def claim(self, request: ClaimRequest) -> Answer:
        """Take the key if no live claim holds it.

        QUEUED and INTERRUPTED records are claimed as if there were none, but keep their crashes, steps and reservation.
        A fingerprint that either side lacks is equal to any. Claiming a PROCESSING record whose lease ran out counts a
        crash.
        """

    @abstractmethod
    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        """Let each lease start anew; ``False`` for each that is no longer held with that token.

        The token decides, not the state: a claim that a sweep made INTERRUPTED or QUEUED is PROCESSING again. One that
        a sweep made FAILED stays so, and ``True`` says that its run may settle it anew.
        """

    @abstractmethod
    def settle(self, request: SettleRequest) -> bool:
        """Write the end state; ``False`` if the key has another token by now.

        Accepted whether or not the lease ran out, also when the record is gone (flushed, evicted), and when the claim
        was settled before: then the first end state stays, unless it is a FAILED that a sweep
        wrote. Without ``restore`` the answer is also
        ``False`` for a record that is gone, or is no longer in the state of the one in the request; one that was
        FAILED there ends anew, as an operator says, and is kept anew.
        """

    @abstractmethod
    def reserve(self, request: ReserveRequest) -> Reservation:
        """Take the key for a message that is about to be published.

        ``Reserved``: publish, under the record's task id. The key had no record, was INTERRUPTED, was reserved under or
        by this very task id (whose answer was lost: the token stays), or its reservation is past its deadline: then the
        record's task id is the one of the first reservation, and stays.
        Any other QUEUED, and any PROCESSING record is ``Held`` (for 0 ms if its lease ran out), a COMPLETED or FAILED
        one ``Settled``. A new reservation gets a new token, and no attempt is counted before its claim.

        Who reserves again under the record's task id may bring another message; otherwise the record keeps the one that
        it has, if any.
        """

    @abstractmethod
    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add the result of the step ``name`` to the claim with this token, swept or not; ``False`` if there is none.

        A step that is there already keeps its first result. Steps stay with the record until it is settled: one of a
        record that a sweep made FAILED is not kept.
        """

    @abstractmethod
    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled record with this token were sent; ``False`` if there is none."""

    @abstractmethod
    def release(
        self, identity: Identity, *, token: int, requeue_ms: int | None = None, note: str = ""
    ) -> bool:
        """Give the key back: delete the PROCESSING or QUEUED record with this token. ``False`` if there was none.

        With ``requeue_ms`` (a retry is about to be published) a record that was reserved, or has a message, goes back
        to QUEUED, with a deadline so many milliseconds from now, and lives that much longer: should the retry never
        come, a sweep sends the message. Any other record with steps becomes INTERRUPTED instead of being deleted,
        without another crash.

        An operator gives a ``note``: a record that stays has it, and a new token.
        """

    @abstractmethod
    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Note that a crash took the owner of the PROCESSING record with this token.

        It becomes INTERRUPTED, claimable, with one crash more, for as long as it would have lived. Returns the record
        as it is now, ``None`` if no PROCESSING record has this token (any more, when the answer was lost).
        """

    @abstractmethod
    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""

    @abstractmethod
    def requeue(
        self, identity: Identity, *, deadline_ms: int, token: int | None = None, note: str = ""
    ) -> Record | None:
        """Make an INTERRUPTED or stale PROCESSING record that has a message QUEUED, as an operator's sweep would.

        Returns the record, whose message is to be published before its deadline, ``deadline_ms`` from now; ``None`` if
        there is no such record. With ``token`` it is the record with that one, even within the lease. It gets a
        new token, and the operator's ``note``.
        """

    @abstractmethod
    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> SweepReport:
        """Interrupt up to about ``limit`` PROCESSING records whose lease ran out, found through an index of leases.

        Whether a record is stale is decided again at the moment of the write, so any number of sweeps may run at once.
        A stale record with ``on_stale="requeue"`` and a message counts the crash and becomes QUEUED in the same step,
        for ``requeue_ms`` times two to the power of the times it was requeued before (at most ten); so does, without a
        crash, a QUEUED one with a message whose deadline is past (its sender died). Each lives as much longer. A QUEUED
        one without a message is left to the next reservation.
        """

    @abstractmethod
    def prune(self, *, limit: int) -> int:
        """Delete up to about ``limit`` records (or index entries) past their retention; return how many."""

    @abstractmethod
    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record; with ``token`` only if it has that one, with ``state`` only if it is in that.

        ``False`` if there was none (any more). Later claims still get a larger token.
        """

    @abstractmethod
    def stats(self) -> Stats:
        """Count the records that an index knows: bounded work, however many are completed."""

    @abstractmethod
    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> Page:
        """Return about ``limit`` of the selected records, having looked at about ``look_at`` keys at most.

        All but COMPLETED records are found through indexes. COMPLETED ones are found only by looking at keys one after
        the other: a page may be empty and yet have a cursor to go on with. Records that come, go or change between two
        pages may be left out, or come twice.

        Where only INTERRUPTED or only FAILED records are wanted, the newest come first, as far as they are kept for
        equally long; any other list is in no particular order.

        Raises:
            ValueError: for a cursor that is none of this store's.
        """

    def close(self) -> None:  # noqa: B027  not every store has something to close
        """Close connections; the store may be used again afterwards."""

    def stores_results_of(self, pool: ConnectionPool) -> bool:  # noqa: ARG002  see settle_with_result
        """Can `settle_with_result` store what a result backend with these connections to Redis would store?"""
        return False

    def settle_with_result(self, request: SettleRequest, result: ResultWrite) -> SettledWith:  # noqa: ARG002
        """Write the end state as :meth:`settle` does and, if that is accepted, the result in the same atomic step.

        A result that says SUCCESS already stays as it is, as Celery's backends leave it. Whatever keeps the result from
        being stored is no trouble of the settle: ``SettledWith.NOTHING``, and its backend is to store it.
        """
        return SettledWith.NOTHING if self.settle(request) else SettledWith.LOST

    def write_result(self, result: ResultWrite) -> bool:  # noqa: ARG002
        """Write the result of a duplicate as :meth:`settle_with_result` does; ``False``: its backend is to store it."""
        return False

    def now_ms(self) -> int:
        """Return the time by the store's clock."""
        # The shortest question whose answer tells the time, with any store.
        return self.list(Selection(states=frozenset({State.QUEUED})), limit=1, look_at=1).now_ms

    def forget_mark(self, identity: Identity, *, token: int) -> None:
        """Forget what a run without retention left behind, to refuse late workers: it answers no other task.

        A store that may have copies needs none of the care of :meth:`forget`: a copy that is left does no harm.
        """
        self.forget(identity, token=token)

    def joined(self) -> bool:
        """Would a verb, here and now, become part of a transaction that the caller may still undo?

        Then nobody else sees what it writes. Only a store in a database has such transactions.
        """
        return False

    def without_cache(self) -> Store:
        """Return the store that decides: this one, or the one behind its cache."""
        return self

    def transaction(self, record: Record | None) -> AbstractContextManager[Transaction]:
        """Begin a transaction for the claim that returned ``record``; it ends with the context, as an exception does.

        While it lasts, a claim of the same key that finds the lease run out first ends this session. Without a record
        it is no more than a transaction, and nothing is settled in it.

        :exc:`~celery_idempotent.errors.LeaseLost` if the record has another token already, and
        :exc:`~celery_idempotent.errors.StoreUnavailable` for what goes wrong before the body, or keeps the settle from
        the record; what the database says to the body's own statements, to the transaction as a whole and to the
        commit comes through as it is.
        """
        raise NotImplementedError(f"{type(self).__name__} has no transactions")

    def committed(self, record: Record) -> bool:
        """Wait for the end of the transaction that settled this claim, and tell whether it was committed.

        Whatever state the record is in by now. :exc:`~celery_idempotent.errors.StoreUnavailable` while it is not over.
        """
        raise NotImplementedError(f"{type(self).__name__} has no transactions")

    def abandon(self, record: Record) -> None:  # noqa: B027  without transactions none is open
        """End the transaction that this thread began for the claim, if it is still open; the next verb may come.

        A time limit may strike between any two instructions, also after the body and before the context could end.
        """

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:  # noqa: B027  see supports_counting
        """Add to the counters of the current hour, by task and outcome. A lost answer may count twice."""

    def counts(self, *, hours: int) -> Sequence[Counted]:  # noqa: ARG002  see supports_counting
        """Return the counters of the last ``hours`` hours (of at most :data:`COUNTED_HOURS`), oldest hour first."""
        return ()

    def note_sweep(self) -> None:  # noqa: B027  see supports_counting
        """Note that a sweep ended just now: ``stats`` tells of the last one, and so whether sweeps run."""

    def upkeep(self, app: Celery, *, limit: int) -> dict[str, int]:  # noqa: ARG002  nothing to do by default
        """Look after what else the store holds for this app; the sweep reports the counts with its own."""
        return {}

    def facts(self) -> Sequence[ServerFacts]:
        """Return what concerns the records in how each server is set up: version, eviction, persistence."""
        return ()

    def missing_bounds(self) -> Sequence[str]:
        """Return the options that would bound the waits for a server that stays silent, and are not set."""
        return ()

    def missing_rights(self) -> Sequence[str]:
        """Return the commands of the server that this user needs and may not run."""
        return ()
