"""What an operator may do to a record, :data:`OPERATIONS`; never by accident to one that has a live owner.

What was decided about one record is never done to another: an operation names the token and the state that the operator
saw, and does nothing where the key has moved on since.

::

    operation   verb of the store                           reported as
    release     release                                     released
    requeue     requeue, then its message is published      requeued, or store_failed
    complete    settle COMPLETED                            settled
    fail        settle FAILED                               settled
    forget      forget                                      forgotten

Every verb gets the token of the record that the operator saw. If another run has claimed the key since, the store
writes nothing, and the outcome is CHANGED. It is DONE if the key is as the operation itself would have left it: the
store may have done it, and not have been heard (:meth:`Operator._as_done`).
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, Literal, Protocol

from celery_idempotent import signals
from celery_idempotent.celery import sweep
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.errors import FailedByOperator, IdempotencyError, InProgress
from celery_idempotent.events import Details, Line, printable, worker_name
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Identity, Record, SettleRequest, State, Stored
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

__all__ = [
    "LONGEST_REASON",
    "ON_MANY",
    "OPERATIONS",
    "AuditEntry",
    "Operation",
    "OperationRequest",
    "Outcome",
    "StartedOperation",
    "audit_logs",
    "is_live",
    "offered",
    "operate",
    "operate_or_raise",
]

Operation = Literal["release", "requeue", "complete", "fail", "forget"]

#: So many characters of a note are stored.
_LONGEST_NOTE = 600

#: What the log says that an operator did.
_DONE: Final[Mapping[Operation, str]] = {
    "release": "released",
    "requeue": "requeued",
    "complete": "completed",
    "fail": "failed",
    "forget": "forgot",
}


class Outcome(enum.Enum):
    """How an operation ended."""

    #: It was done.
    DONE = "done"
    #: Nothing was done: the key has another record by now, or none, or its state has changed.
    CHANGED = "changed"
    #: Nothing was done: an owner within its lease holds the key.
    LIVE = "live"
    #: Requeued, but its message could not be published: the next sweep after its deadline tries again.
    UNSENT = "unsent"


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """What somebody wants done to a record: ``who``, and why.

    ``who``: this process, if no one is named. ``force``: also where an owner within its lease holds the key. ``value``:
    what to complete with, as the task would write it.
    """

    operation: Operation
    _: KW_ONLY
    who: str = ""
    reason: str = ""
    force: bool = False
    value: Stored | None = None


#: All of them, in the order in which they are offered.
OPERATIONS: tuple[Operation, ...] = ("release", "requeue", "complete", "fail", "forget")

#: Those that mean the same for many records: a value is that of one key.
ON_MANY: tuple[Operation, ...] = tuple(each for each in OPERATIONS if each != "complete")

#: So many characters of a reason pages and commands take.
LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class StartedOperation:
    """An operation on a record that is about to be done; ``forced``: an owner within its lease holds the key."""

    identity: Identity
    request: OperationRequest
    forced: bool


class AuditEntry(Protocol):
    """An entry of an audit log about one operation: written before it is done, completed after."""

    def done(self, trouble: str = "") -> None:
        """Write that it was done."""

    def failed(self, trouble: str) -> None:
        """Write that it was tried."""

    def withdraw(self) -> None:
        """Delete the entry: nothing was done."""


#: Where operations of named people are written down, beside the event and the log: Django's admin log, where our app is
#: installed. ``None``: this log has no place for that person.
audit_logs: list[Callable[[StartedOperation], AuditEntry | None]] = []


def is_live(record: Record, now_ms: int) -> bool:
    """Does an owner within its lease hold the key at ``now_ms`` of the store's clock?"""
    return record.state is State.PROCESSING and not record.stale(now_ms)


def offered(record: Record, *, known: bool = True) -> tuple[Operation, ...]:
    """Return the operations that mean something for a record, as :meth:`Store.get` returns it.

    ``known``: does a task of this app have its namespace? Nobody else could write a value.
    """
    possible: dict[Operation, bool] = {
        "release": record.state in {State.QUEUED, State.PROCESSING},
        "requeue": record.state in {State.PROCESSING, State.INTERRUPTED}
        and record.message is not None,
        # Not a COMPLETED one: somebody may have got that value.
        "complete": known and record.state is not State.COMPLETED,
        "fail": not record.state.settled,
        "forget": True,
    }
    return tuple(each for each in OPERATIONS if possible[each])


def operate(
    app: AnyCelery, identity: Identity, request: OperationRequest, *, token: int, state: State
) -> Outcome:
    """Do what is asked for to the record that has this token and this state.

    A record whose owner is live is left alone, unless this is
    forced: then its owner loses the key, and may still be at work. The next claim gets a larger token. The log and the
    event tell who did it and why; so do the :data:`audit_logs`, which have it before it is done, so that nothing a
    person does is without a trace.

    Raises:
        StoreUnavailable: if the store did not answer; what was asked for may have been done.
        ValueError: for a value with an operation that takes none, or no value to complete with.
    """
    _check(request)
    store = get_store(app)
    record = store.get(identity)
    if record is None or (record.token, record.state) != (token, state):
        return Outcome.CHANGED
    if request.operation not in offered(record):
        return Outcome.CHANGED
    live = is_live(record, store.now_ms())
    if live and not request.force:
        return Outcome.LIVE
    started = StartedOperation(identity, request, forced=live)
    entries = [entry for open_entry in audit_logs if request.who and (entry := open_entry(started))]
    try:
        outcome = Operator(app, store, request).execute(record)
    except IdempotencyError:
        for entry in entries:
            entry.failed(_state_afterwards(store, record))
        raise
    for entry in entries:
        match outcome:
            case Outcome.DONE:
                entry.done()
            case Outcome.UNSENT:
                entry.done("its message could not be published yet")
            case Outcome.CHANGED | Outcome.LIVE:
                entry.withdraw()
    if outcome is not Outcome.CHANGED:
        heartbeat.start()  # which writes the counters
    return outcome


def _check(request: OperationRequest) -> None:
    if (request.operation == "complete") is (request.value is None):
        raise ValueError("complete takes a value, and nothing else does")


def _state_afterwards(store: Store, before: Record) -> str:
    """Say what is known of an operation that the store did not confirm."""
    try:
        record = store.get(before.identity)
    except IdempotencyError:
        return "the store did not answer: it may have been done"
    if record is not None and (record.token, record.state) == (before.token, before.state):
        return "right after that the record was still there, unchanged"
    return "right after that the record was gone, or another"


def operate_or_raise(app: Celery, identity: Identity, request: OperationRequest) -> bool:
    """Do what is asked for to whatever record a key has; ``False`` if it has none for which that means something.

    Raises:
        InProgress: if an owner within its lease holds the key, and this is not forced.
        ValueError: if it is forced without a reason; as :func:`operate` does.
        StoreUnavailable: if the store did not answer; it may have been done.
    """
    if request.force and not request.reason:
        raise ValueError("to take a key away from a live owner, say why: reason=…")
    _check(request)
    store, operation = get_store(app), request.operation
    while (record := store.get(identity)) is not None and operation in offered(record):
        outcome = operate(app, identity, request, token=record.token, state=record.state)
        if outcome is Outcome.LIVE:
            raise InProgress(
                f"{identity} is held by {record.owner}, and was left alone ({operation}): wait for its end, or give"
                " force=True and a reason.",
                task_id=record.task_id,
            )
        if outcome is not Outcome.CHANGED:
            return True
        # It has changed since: look again.
    if operation == "forget":
        # No record has that token. A copy in a cache goes all the same, which an earlier try may have left.
        store.forget(identity, token=0)
    return False


@dataclass(frozen=True, slots=True)
class Operator:
    """Executes a request on the records of an app."""

    app: Celery
    store: Store
    request: OperationRequest

    @property
    def who(self) -> str:
        """Who asked for it."""
        return self.request.who or worker_name(os.getpid())

    @property
    def note(self) -> str:
        """What the record keeps of it."""
        why = f": {self.request.reason}" if self.request.reason else ""
        return printable(f"{self.request.operation} by {self.who}{why}")[:_LONGEST_NOTE]

    @property
    def _about(self) -> Details:
        text = f"%(who)s {_DONE[self.request.operation]} %(identity)s%(why)s"
        line = Line(logging.WARNING, text)
        return {"who": self.who, "reason": self.request.reason, "line": line}

    def execute(self, record: Record) -> Outcome:
        """Execute the request on a record as it was seen."""
        identity, token, note = record.identity, record.token, self.note
        outcome, state, error = signals.settled, None, None
        match self.request.operation:
            case "release":
                outcome, state = signals.released, State.INTERRUPTED if record.steps else None
                done = self.store.release(identity, token=token, note=note)
                done = done or self._as_done(record, state) is not None
            case "forget":
                outcome = signals.forgotten
                # The state, too: a run that completed a moment ago is not what was seen.
                done = self.store.forget(identity, token=token, state=record.state)
                done = done or self._as_done(record, None) is not None
            case "complete":
                state, done = State.COMPLETED, self._complete(record)
            case "fail":
                state = State.FAILED
                error = FailedByOperator(f"{identity} was settled as failed by an operator.")
                done = sweep.fail_record(self.app, self.store, record, error, note=note)
            case "requeue":
                return self._requeue(record)
        if not done:
            return Outcome.CHANGED
        about: Details = {**self._about, "state": state, "error": error}
        sweep.report_record(self.app, self.store, outcome, record, **about)
        return Outcome.DONE

    def _complete(self, record: Record) -> bool:
        definition = definition_of(self.app, record.identity.namespace, load=True)
        policy = Policy() if definition is None else definition.policy
        end = SettleRequest(
            record=record,
            state=State.COMPLETED,
            value=self.request.value,
            keep_ms=policy.settled_keep_ms,
            restore=False,
            note=self.note,
        )
        return sweep.end_record(self.store, end)

    def _requeue(self, record: Record) -> Outcome:
        # One write: from then on a sweep publishes what we do not, should we die here or the broker be down.
        queued = self.store.requeue(
            record.identity, deadline_ms=sweep.REQUEUE_MS, token=record.token, note=self.note
        )
        # Published here also if a sweep was first: a second copy does no harm, none would take a minute.
        queued = queued or self._as_done(record, State.QUEUED)
        if queued is None:
            return Outcome.CHANGED
        sent = sweep.send_again(self.app, self.store, queued, **self._about)
        return Outcome.DONE if sent else Outcome.UNSENT

    def _as_done(self, seen: Record, then: State | None) -> Record | None:
        """Return the record as an operation leaves it, although the store says that it did nothing.

        A store that gets no answer asks again by itself, and then finds its own work::

            store    forget ─ deleted, and the answer is lost ─ forget again: there is none
                                                                └─ CHANGED: no event, no line, no entry

        Another operator may have done the same in that instant. Then both report it, which is better than neither.
        ``then`` is the state that the record is left in, ``None`` if it is deleted.
        """
        found = self.store.get(seen.identity)
        if then is None:
            # A record that was not deleted keeps its beginning, also when it is claimed again.
            return seen if found is None or found.created_ms != seen.created_ms else None
        if found is None or (found.state, found.note) != (then, self.note):
            return None
        return found
