"""What an operator may do to a record, :data:`OPERATIONS`; never by accident to one that has a live owner.

What was decided about one record is never done to another: an operation names the token and the state that the operator
saw, and does nothing where the key has moved on since.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from celery_idempotent.celery.operator import Operation, OperationRequest, Operator, Outcome
from celery_idempotent.errors import IdempotencyError, InProgress
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.records import Identity, Record, State
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
