"""What an operator may do to a record: release, forget, fail, requeue; never by accident to one that has a live owner.

What was decided about one record is never done to another: an operation names the token and the state that the operator
saw, and does nothing where the key has moved on since.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from celery_idempotent import signals
from celery_idempotent.celery import reaper
from celery_idempotent.errors import FailedByOperator, IdempotencyError, InProgress
from celery_idempotent.protocol.calls import worker_name
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.protocol.telling import Line
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from celery.utils.dispatch import Signal

    from celery_idempotent.stores import Store

__all__ = [
    "OPERATIONS",
    "Begun",
    "Note",
    "Operation",
    "Outcome",
    "is_live",
    "notebooks",
    "offered",
    "operate",
    "operate_or_raise",
]

Operation = Literal["release", "forget", "fail", "requeue"]

#: All of them, in the order in which they are offered.
OPERATIONS: tuple[Operation, ...] = ("release", "requeue", "fail", "forget")

_UNFINISHED = frozenset({State.QUEUED, State.PROCESSING, State.INTERRUPTED})


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """An operation that is about to be done: by whom, to what, why, and whether it is forced on a live owner."""

    identity: Identity
    operation: Operation
    who: str
    reason: str
    forced: bool


class Note(Protocol):
    """What a notebook writes about one operation: begun before it is done, completed after."""

    def done(self, trouble: str = "") -> None:
        """Note that it was done."""

    def failed(self, trouble: str) -> None:
        """Note that it was tried."""

    def withdraw(self) -> None:
        """Note nothing: nothing was done."""


#: Where operations of named people are written down, beside the event and the log: Django's admin log, where our app is
#: installed. ``None``: this notebook has no place for that person.
notebooks: list[Callable[[Begun], Note | None]] = []


def is_live(record: Record, now_ms: int) -> bool:
    """Does an owner within its lease hold the key at ``now_ms`` of the store's clock?"""
    return record.state is State.PROCESSING and not record.stale(now_ms)


def offered(record: Record) -> tuple[Operation, ...]:
    """Return the operations that mean something for a record, as :meth:`Store.get` returns it."""
    possible: dict[Operation, bool] = {
        "release": record.state in {State.QUEUED, State.PROCESSING},
        "requeue": record.state in {State.PROCESSING, State.INTERRUPTED}
        and record.message is not None,
        "fail": record.state in _UNFINISHED,
        "forget": True,
    }
    return tuple(each for each in OPERATIONS if possible[each])


def operate(
    app: Celery,
    identity: Identity,
    operation: Operation,
    *,
    token: int,
    state: State,
    force: bool = False,
    who: str = "",
    reason: str = "",
) -> Outcome:
    """Do one of :data:`OPERATIONS` to the record that has this token and this state.

    A record whose owner is live is left alone, unless this is forced: then its owner loses the key, and may still be
    at work. The next claim gets a larger token. The log and the event tell ``who`` did it and why; so do the
    :data:`notebooks`, which have it before it is done, so that nothing a person does is without a trace.

    Raises:
        StoreUnavailable: if the store did not answer; what was asked for may have been done.
    """
    store = get_store(app)
    record = store.get(identity)
    if record is None or (record.token, record.state) != (token, state):
        return Outcome.CHANGED
    if operation not in offered(record):
        return Outcome.CHANGED
    live = is_live(record, store.now_ms())
    if live and not force:
        return Outcome.LIVE
    begun = Begun(identity=identity, operation=operation, who=who, reason=reason, forced=live)
    notes = [note for open_note in notebooks if who and (note := open_note(begun))]
    try:
        outcome = _carry_out(app, store, record, operation, who=who, reason=reason)
    except IdempotencyError:
        for note in notes:
            note.failed(_aftermath(store, record))
        raise
    for note in notes:
        match outcome:
            case Outcome.DONE:
                note.done()
            case Outcome.UNSENT:
                note.done("its message could not be published yet")
            case Outcome.CHANGED | Outcome.LIVE:
                note.withdraw()
    if outcome is not Outcome.CHANGED:
        heartbeat.start()  # which writes the counters
    return outcome


def _aftermath(store: Store, before: Record) -> str:
    """Say what is known of an operation that the store did not confirm."""
    try:
        record = store.get(before.identity)
    except IdempotencyError:
        return "the store did not answer: it may have been done"
    if record is not None and (record.token, record.state) == (before.token, before.state):
        return "right after that the record was still there, unchanged"
    return "right after that the record was gone, or another"


def _carry_out(
    app: Celery, store: Store, record: Record, operation: Operation, *, who: str, reason: str
) -> Outcome:
    line = Line(logging.WARNING, f"%(who)s chose to {operation} %(identity)s%(why)s")
    by = _Operator(app, store, who or worker_name(os.getpid()), reason, line)
    match operation:
        case "release":
            return _release(by, record)
        case "requeue":
            return _requeue(by, record)
        case "fail":
            return _fail(by, record)
        case "forget":
            return _forget(by, record)


def operate_or_raise(
    app: Celery,
    identity: Identity,
    operation: Operation,
    *,
    force: bool = False,
    who: str = "",
    reason: str = "",
) -> bool:
    """Do an operation to whatever record a key has; ``False`` if it has none for which it means something.

    Raises:
        InProgress: if an owner within its lease holds the key, and this is not forced.
        ValueError: if it is forced without a reason.
        StoreUnavailable: if the store did not answer; it may have been done.
    """
    if force and not reason:
        raise ValueError("to take a key away from a live owner, say why: reason=…")
    store = get_store(app)
    while (record := store.get(identity)) is not None and operation in offered(record):
        outcome = operate(
            app,
            identity,
            operation,
            token=record.token,
            state=record.state,
            force=force,
            who=who,
            reason=reason,
        )
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
class _Operator:
    """Who operates on the records of an app, and why."""

    app: Celery
    store: Store
    who: str
    reason: str
    line: Line

    def report(self, outcome: Signal, record: Record, **more: Any) -> None:
        """Report what was done."""
        by = {"who": self.who, "reason": self.reason, "line": self.line}
        reaper.report_record(self.app, self.store, outcome, record, **by, **more)


def _forget(by: _Operator, record: Record) -> Outcome:
    # The state, too: a run that completed a moment ago is not what was seen.
    if not by.store.forget(record.identity, token=record.token, state=record.state):
        return Outcome.CHANGED
    by.report(signals.forgotten, record)
    return Outcome.DONE


def _release(by: _Operator, record: Record) -> Outcome:
    if not by.store.release(record.identity, token=record.token):
        return Outcome.CHANGED
    by.report(signals.released, record, state=State.INTERRUPTED if record.steps else None)
    return Outcome.DONE


def _requeue(by: _Operator, record: Record) -> Outcome:
    # One write: from then on a sweep publishes what we do not, should we die here or the broker be down.
    queued = by.store.requeue(record.identity, deadline_ms=reaper.REQUEUE_MS, token=record.token)
    if queued is None:
        return Outcome.CHANGED
    sent = reaper.send_again(by.app, by.store, queued, who=by.who, reason=by.reason, line=by.line)
    return Outcome.DONE if sent else Outcome.UNSENT


def _fail(by: _Operator, record: Record) -> Outcome:
    error = FailedByOperator(f"{record.identity} was settled as failed by an operator.")
    if not reaper.fail_record(by.app, by.store, record, error):
        return Outcome.CHANGED
    by.report(signals.settled, record, state=State.FAILED, error=error)
    return Outcome.DONE
