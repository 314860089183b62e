"""A store: the public verbs, written once over a look and a write, and its optional abilities."""

from __future__ import annotations

import logging
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from celery_idempotent import records
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured
from celery_idempotent.records import Identity, Record, Selection, SettleRequest, State, Stored
from celery_idempotent.stores import table
from celery_idempotent.stores.fields import Unreadable
from celery_idempotent.stores.table import Snapshot, Verb, VerbArguments

if TYPE_CHECKING:
    from celery import Celery
    from redis import ConnectionPool

__all__ = ["HOUR", "MINUTE", "Period", "ServerFacts", "Store", "Transaction"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class Period(NamedTuple):
    """The length of time that a counter is for, and how many of them are kept."""

    ms: int
    kept: int

    def start(self, now_ms: int, ago: int = 0) -> int:
        """Return when the current period began, or the one so many before."""
        return (now_ms // self.ms - ago) * self.ms


#: Each write of the counters adds to both.
MINUTE, HOUR = PERIODS = Period(60_000, 120), Period(3_600_000, 30 * 24)

#: Why a store does not serve: no answer; rights or settings; it takes no writes, as if full or a replica.
Problem: TypeAlias = Literal["down", "refused", "read-only"]


def write_cursor(kind: str, *place: int) -> str:
    """Return the cursor of a list's next page: the kind of list, and numbers that only this kind reads."""
    return ":".join([kind, *map(str, place)])


def read_cursor(cursor: str, kind: str, count: int) -> tuple[int, ...]:
    """Return the numbers of a cursor, zeros for the first page; ``ValueError`` for another kind of list."""
    word, *numbers = (cursor or write_cursor(kind, *[0] * count)).split(":")
    if word != kind or len(numbers) != count or not all(map(str.isdecimal, numbers)):
        raise ValueError("this cursor belongs to another list")
    return tuple(map(int, numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """One server of a store; ``persistent`` is ``None`` if it does not tell."""

    kind: str
    version: str
    eviction: str
    persistent: bool | None
    memory: str = ""

    @property
    def release(self) -> tuple[int, ...]:
        """The version as two numbers."""
        return tuple(int(number) for number in re.findall(r"\d+", self.version)[:2])


class Health(NamedTuple):
    """Whether a store serves, and its :meth:`Store.mark_use`."""

    problem: Problem | None = None
    error: IdempotencyError | None = None
    stats: records.Stats | None = None
    mark: int = 0


class Transaction(AbstractContextManager[object], Protocol):
    """A transaction of the store's database that a run is part of; its context commits at the end.

    Entering it raises ``LeaseLost`` if the record has another token, ``StoreUnavailable`` for trouble or if another
    session is in it, and ``StoreMisconfigured`` inside another transaction.
    """

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, to be committed with the rest; ``False`` if the key has another token.

        Raises ``StoreMisconfigured`` if the task ended the transaction, the database's error if the whole is undone.
        """

    def is_transient(self, error: Exception, *, at_end: bool) -> bool:
        """Is it a lost session or, at the settle or the commit (``at_end``), a serialization failure or deadlock?"""

    def read_only(self) -> AbstractContextManager[None]:
        """Refuse writes during a step, by an ``IdempotencyError``: its result outlives a rollback."""

    def committed(self) -> bool:
        """Wait for the end of the transaction, say whether it was committed, and call what waited for that."""

    def abandon(self) -> None:
        """End the transaction, which a time limit may have left open."""


class Store(ABC):
    """Holds the records. A store of your own implements the abstract methods.

    Times are milliseconds of the store's clock. A verb whose answer was lost may be repeated, and answers as it did the
    first time. A write after the claim carries the record's token and does nothing for any other. Every verb may raise
    :exc:`~celery_idempotent.errors.StoreUnavailable` (trying again may help) or
    :exc:`~celery_idempotent.errors.StoreMisconfigured` (it will not).
    """

    #: Can a run be part of its transactions? Then it has `transaction` and `unguarded_transaction`.
    supports_transactions: bool = False
    #: Does it have `count`, `_counts` and `note_sweep`?
    supports_counting: bool = False
    #: May a thread use it while the process forks? A fork copies SQLite's mutexes as they are, locked for ever perhaps.
    safe_beside_forks: bool = True
    #: The Django database whose outbox `upkeep` sweeps.
    outbox_alias: str | None = None
    #: The mark of the first use, as this process saw it last.
    _mark = 0

    @abstractmethod
    def _at(self, identity: Identity, verb: Callable[[Snapshot], T]) -> T:
        """Look at a key and do a verb with that; both again if another client wrote in between."""

    @abstractmethod
    def _due(self, limit: int) -> Sequence[Identity]:
        """Return keys past their deadline that a sweep may act on, by an index."""

    # -- the verbs --

    def claim(self, request: records.ClaimRequest) -> records.Answer:
        """Take the key if no live claim holds it. A missing fingerprint, on either side, matches any."""
        answer: records.Answer = self.fast("claim", request) or self._take("claim", request)
        return answer

    def reserve(self, request: records.ReserveRequest) -> records.Reservation:
        """Take the key for a message that is to be published under the task id of the record in the answer."""
        found: records.Reservation = self.fast("reserve", request) or self._take("reserve", request)
        return found

    def renew(self, leases: Sequence[records.Renewal]) -> list[bool]:
        """Restart each lease, also one that a sweep ended; ``False`` for each key with another token."""
        return [self._renew(each) for each in leases]

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, also if the record is gone or swept; ``False`` if the key has another token."""
        return bool(self.fast("settle", request)) or self._settle(request)

    def release(
        self, identity: Identity, *, token: int, requeue_ms: int | None = None, note: str = ""
    ) -> bool:
        """Delete the PROCESSING or QUEUED record with this token; ``False`` if there is none.

        With steps it becomes INTERRUPTED; before a retry (``requeue_ms``), if reserved or with a message, QUEUED.
        """
        args = VerbArguments({"note": note}, token=token, delay_ms=requeue_ms)
        return self._ask("release", identity, args)

    def take_back(
        self, identity: Identity, *, attempt: bytes, requeue_ms: int | None = None
    ) -> bool:
        """Undo the claim of this attempt, which was not answered and did not run; ``False`` if there is none.

        As after :meth:`release`, but with crashes or steps of earlier runs it becomes INTERRUPTED.
        """
        args = VerbArguments(attempt=attempt, delay_ms=requeue_ms)
        return self._ask("take_back", identity, args)

    def replace(self, identity: Identity, *, token: int, message: bytes) -> bool:
        """Put another message in the place of a reservation's, under a new token; ``False`` if it is gone."""
        return self._ask("replace", identity, VerbArguments({"message": message}, token=token))

    def start(self, identity: Identity, *, task_id: str, token: int | None = None) -> Record | None:
        """Delete the reservation of this task, which has started; return it as it was."""
        args = VerbArguments({"task_id": task_id}, token=token)
        return self._at(identity, lambda snapshot: self._do("start", snapshot, args)[1])

    def interrupt(self, identity: Identity, *, token: int) -> Record | None:
        """Make the PROCESSING record with this token, whose owner crashed, INTERRUPTED; return it."""
        args = VerbArguments(token=token)
        return self._at(identity, lambda snapshot: self._do("interrupt", snapshot, args)[1])

    def checkpoint(self, identity: Identity, *, token: int, name: str, value: Stored) -> bool:
        """Add a step's first result to the claim with this token, swept or not; ``False`` if there is none."""
        return self._ask("checkpoint", identity, VerbArguments(token=token, step=(name, value)))

    def mark_delivered(self, identity: Identity, *, token: int) -> bool:
        """Note that the callbacks of the settled record with this token were sent; ``False`` if there is none."""
        args = VerbArguments({"delivered": True}, token=token)
        return self._ask("mark_delivered", identity, args)

    def requeue(
        self,
        identity: Identity,
        *,
        deadline_ms: int,
        token: int | None = None,
        state: State | None = None,
        note: str = "",
    ) -> Record | None:
        """Make an INTERRUPTED, FAILED or stale record with a message QUEUED, or the one with this ``token``.

        ``state``: only from this state.
        """
        args = VerbArguments({"note": note}, b"", token=token, delay_ms=deadline_ms, state=state)
        return self._at(identity, lambda snapshot: self._do("requeue", snapshot, args)[1])

    def forget(
        self, identity: Identity, *, token: int | None = None, state: State | None = None
    ) -> bool:
        """Delete the record (with this ``token``, in this ``state``); ``False`` if there was none."""
        return self._ask("forget", identity, VerbArguments(token=token, state=state))

    def get(self, identity: Identity) -> Record | None:
        """Return the record as it is."""
        snapshot = self._at(identity, lambda snapshot: snapshot)
        return None if snapshot.stored is None else snapshot.stored.record

    def sweep(self, *, limit: int, requeue_ms: int = 60_000) -> records.SweepReport:
        """Interrupt or requeue up to about ``limit`` records whose lease ran out; many sweeps may run at once."""
        found = list(self._due(limit + 1))
        due = found[:limit]
        random.shuffle(due)  # lest concurrent sweeps meet at one record after another
        swept = [record for record in self._sweep_all(due, requeue_ms) if record is not None]
        return records.SweepReport(
            interrupted=tuple(r for r in swept if r.state is State.INTERRUPTED),
            requeued=tuple(r for r in swept if r.state is State.QUEUED),
            more=len(found) > limit,
        )

    def _take(
        self, verb: Verb, request: records.ClaimRequest | records.ReserveRequest, *found: Any
    ) -> Any:
        args = table.arguments(request)
        return self._at(
            request.identity, lambda snapshot: self._taken(verb, snapshot, args), *found
        )

    def _taken(self, verb: Verb, snapshot: Snapshot, args: VerbArguments) -> object:
        answer, taken = self._do(verb, snapshot, args)
        if taken is not None:
            return records.Claimed(taken) if verb == "claim" else records.Reserved(taken)
        assert snapshot.stored is not None
        old, now_ms = snapshot.stored.record, snapshot.now_us // 1000
        if answer == "held":
            return records.Held(old, max((old.deadline_ms or 0) - now_ms, 0))
        if answer == "settled":
            return records.Settled(old, max(now_ms - old.updated_ms, 0))
        return records.Mismatched(old)

    def _settle(self, request: SettleRequest) -> bool:
        return self._ask("settle", request.record.identity, table.arguments(request))

    def _ask(self, verb: Verb, identity: Identity, args: VerbArguments) -> bool:
        answer, _ = self._at(identity, lambda snapshot: self._do(verb, snapshot, args))
        return answer not in ("lost", "none")

    def _do(self, verb: Verb, snapshot: Snapshot, args: VerbArguments) -> tuple[str, Record | None]:
        """Apply the table's rule to a snapshot; return its answer, and the record that it wrote or deleted."""
        stored, now_ms = snapshot.stored, snapshot.now_us // 1000
        rule = table.decide(verb, stored, args, now_ms)
        if rule.then is None:
            return rule.answer, None
        if rule.then == "deleted":
            snapshot.remove(forget=verb == "forget")
        else:
            stored = table.after(
                rule, stored, args, now_ms, max(snapshot.highest + 1, snapshot.now_us)
            )
            snapshot.write(stored)
        return rule.answer, stored and stored.record

    def _renew(self, each: records.Renewal) -> bool:
        args = VerbArguments(token=each.token, delay_ms=each.lease_ms, keep_ms=each.keep_ms)
        return self._ask("renew", each.identity, args)

    def _sweep_all(self, due: Sequence[Identity], requeue_ms: int) -> Iterable[Record | None]:
        for each in due:
            with suppress(Unreadable):  # left to the newer version that wrote it
                yield self._at(each, lambda snapshot: self._sweep(snapshot, requeue_ms))

    def _sweep(self, snapshot: Snapshot, requeue_ms: int) -> Record | None:
        return self._do("sweep", snapshot, VerbArguments({}, b"", requeue_ms))[1]

    # -- many records --

    @abstractmethod
    def stats(self) -> records.Stats:
        """Count the records that are not COMPLETED, by indexes, which may have expired ones until the next prune."""

    @abstractmethod
    def list(
        self, selection: Selection, *, cursor: str = "", limit: int = 50, look_at: int = 5000
    ) -> records.Page:
        """Return about ``limit`` of the selected records, having looked at about ``look_at`` keys at most.

        COMPLETED records have no index: a page may be empty and yet have a cursor. A record that changes between two
        pages may be left out or come twice. INTERRUPTED and FAILED records come newest first, by their last change.
        """

    @abstractmethod
    def prune(self, *, limit: int) -> int:
        """Delete up to ``limit`` records past their retention; return how many."""

    # -- optional --

    def fast(self, verb: Verb, request: Any) -> Any:  # noqa: ARG002
        """Answer a claim, a reservation or a settle in a shorter way; ``None``: the table decides."""
        return None

    def discard(self, identity: Identity) -> bool:
        """Delete a record, also one that cannot be read; ``False`` if there was none."""
        return self.forget(identity)

    def close(self) -> None:  # noqa: B027
        """Close connections; the store may be used again afterwards."""

    def stores_results_of(self, pool: ConnectionPool) -> bool:  # noqa: ARG002
        """Can it write the results of a backend with these connections, by the next two methods?"""
        return False

    def settle_with_result(
        self, request: SettleRequest, result: records.ResultWrite
    ) -> records.SettledWith:
        """Write the end state and, in the same atomic step, the result, over any but a SUCCESS."""
        raise NotImplementedError

    def write_result(self, result: records.ResultWrite) -> bool:
        """Write the first result of a duplicate; ``False``: its backend has to."""
        raise NotImplementedError

    def now_ms(self) -> int:
        """Return the time by the store's clock."""
        return self.list(Selection(states=frozenset({State.QUEUED})), limit=1, look_at=1).now_ms

    def joined(self) -> bool:
        """Would a verb now become part of a transaction that the caller may still undo?"""
        return False

    def unguarded_transaction(self) -> AbstractContextManager[object]:
        """Return a transaction in which nothing is settled."""
        raise NotImplementedError(f"{type(self).__name__} has no transactions")

    def transaction(self, record: Record) -> Transaction:
        """Return the transaction in which the claim of ``record`` runs."""
        raise NotImplementedError(f"{type(self).__name__} has no transactions")

    def count(self, outcomes: Mapping[tuple[str, str], int]) -> None:  # noqa: B027  see supports_counting
        """Add to the counters of the current minute and hour, by task and outcome."""

    def counts(self, *, hours: int = 0, minutes: int = 0) -> Sequence[records.Counted]:
        """Return the counters of the last ``hours`` or ``minutes``, oldest first."""
        if not self.supports_counting:
            return ()
        period, now_ms = HOUR if hours else MINUTE, self.now_ms()
        first = period.start(now_ms, min(hours or minutes, period.kept) - 1)
        return self._counts(period, range(first, now_ms + 1, period.ms))

    def _counts(self, period: Period, starts: Sequence[int]) -> Sequence[records.Counted]:  # noqa: ARG002
        """Return the counters of the periods that began then."""
        return ()

    def note_sweep(self) -> None:  # noqa: B027  see supports_counting
        """Note that a sweep ended just now, for ``stats``."""

    def health(self) -> Health:
        """Read, and then write as a run does. Never raises for the store."""
        stats = None
        try:
            stats = self.stats()
            self.probe()
        except StoreMisconfigured as error:
            return Health("refused", error, stats)
        except IdempotencyError as error:
            return Health("read-only" if stats else "down", error, stats)
        return Health(stats=stats, mark=self._mark)

    def probe(self) -> None:
        """Write the mark of the first use, unless it is there; a later one than before tells that data was lost."""
        mark = self.mark_use()
        if 0 < abs(self._mark) < abs(mark):
            logger.error("idempotency: %r lost its data: what was done may run again", self)
            mark = self.mark_use(lost_ms=abs(mark))
        self._mark = mark

    def mark_use(self, *, lost_ms: int = 0) -> int:  # noqa: ARG002  optional
        """Write the time of the first use, negative, unless there is a mark; ``lost_ms`` over it; return the mark."""
        return 0

    def upkeep(self, app: Celery, *, limit: int) -> dict[str, int]:  # noqa: ARG002  nothing to do by default
        """Maintain the outbox and the like; the sweep reports the counts with its own."""
        return {}

    def facts(self) -> Sequence[ServerFacts]:
        """Return the version and settings of each server that concern the records."""
        return ()

    def atomic_findings(self) -> Sequence[str]:
        """Return the ids of the findings about tasks that run in its transactions: W025, W026."""
        return ()

    def missing_rights(self) -> Sequence[str]:
        """Return the server's commands that this user needs and may not run."""
        return ()
