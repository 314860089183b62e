"""What each operation writes to the store, and how it is reported: with the operator and the reason.

::

    operation   verb of the store                           reported as
    release     release                                     released
    requeue     requeue, then its message is published      requeued, or store_failed
    complete    settle COMPLETED                            settled
    fail        settle FAILED                               settled
    forget      forget                                      forgotten

Every verb gets the token of the record that the operator saw. If another run has claimed the key since, the store
writes nothing, and the outcome is CHANGED. It is DONE if the key is as the operation itself would have left it: the
store may have done it, and not have been heard (:func:`_as_done`).
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, Literal

from celery_idempotent import signals
from celery_idempotent.celery import reaper, settling
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.errors import FailedByOperator
from celery_idempotent.protocol.calls import worker_name
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.telling import Details, Line, printable
from celery_idempotent.records import Record, SettleRequest, State, Stored

if TYPE_CHECKING:
    from celery import Celery
    from celery.utils.dispatch import Signal
    from typing_extensions import Unpack

    from celery_idempotent.stores import Store

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


@dataclass(frozen=True, slots=True)
class Operator:
    """What executes a request on the records of an app."""

    app: Celery
    store: Store
    request: OperationRequest

    @property
    def who(self) -> str:
        """Who asked for it."""
        return self.request.who or worker_name(os.getpid())

    @property
    def line(self) -> Line:
        """What the log says of it."""
        return Line(logging.WARNING, f"%(who)s {_DONE[self.request.operation]} %(identity)s%(why)s")

    def execute(self, record: Record) -> Outcome:
        """Execute the request on a record as it was seen."""
        match self.request.operation:
            case "release":
                return _release(self, record)
            case "requeue":
                return _requeue(self, record)
            case "complete":
                return _complete(self, record)
            case "fail":
                return _fail(self, record)
            case "forget":
                return _forget(self, record)

    @property
    def note(self) -> str:
        """What the record keeps of it."""
        why = f": {self.request.reason}" if self.request.reason else ""
        return printable(f"{self.request.operation} by {self.who}{why}")[:_LONGEST_NOTE]

    def report(self, outcome: Signal, record: Record, **more: Unpack[Details]) -> None:
        """Report what was done."""
        about: Details = {**more, "who": self.who, "reason": self.request.reason, "line": self.line}
        reaper.report_record(self.app, self.store, outcome, record, **about)


def _as_done(by: Operator, seen: Record, then: State | None) -> Record | None:
    """Return the record as an operation leaves it, although the store says that it did nothing; ``None`` if it is not.

    A store that gets no answer asks again by itself, and then finds its own work::

        store    forget ─ deleted, and the answer is lost ─ forget again: there is none
                                                            └─ CHANGED: no event, no line, no entry for what was done

    Another operator may have done the same in that instant. Then both report it, which is better than neither.
    ``then`` is the state that the record is left in, ``None`` if it is deleted.
    """
    found = by.store.get(seen.identity)
    if then is None:
        # A record that was not deleted keeps its beginning, also when it is claimed again.
        return seen if found is None or found.created_ms != seen.created_ms else None
    if found is None:
        return None
    return found if (found.state, found.note) == (then, by.note) else None


def _forget(by: Operator, record: Record) -> Outcome:
    # The state, too: a run that completed a moment ago is not what was seen.
    done = by.store.forget(record.identity, token=record.token, state=record.state)
    if not done and _as_done(by, record, None) is None:
        return Outcome.CHANGED
    by.report(signals.forgotten, record)
    return Outcome.DONE


def _release(by: Operator, record: Record) -> Outcome:
    state = State.INTERRUPTED if record.steps else None
    done = by.store.release(record.identity, token=record.token, note=by.note)
    if not done and _as_done(by, record, state) is None:
        return Outcome.CHANGED
    by.report(signals.released, record, state=state)
    return Outcome.DONE


def _requeue(by: Operator, record: Record) -> Outcome:
    # One write: from then on a sweep publishes what we do not, should we die here or the broker be down.
    queued = by.store.requeue(
        record.identity, deadline_ms=reaper.REQUEUE_MS, token=record.token, note=by.note
    )
    if queued is None:
        # Published here also if a sweep was first: a second copy does no harm, none would take a minute.
        queued = _as_done(by, record, State.QUEUED)
    if queued is None:
        return Outcome.CHANGED
    sent = reaper.send_again(
        by.app, by.store, queued, who=by.who, reason=by.request.reason, line=by.line
    )
    return Outcome.DONE if sent else Outcome.UNSENT


def _complete(by: Operator, record: Record) -> Outcome:
    definition = definition_of(by.app, record.identity.namespace, load=True)
    policy = Policy() if definition is None else definition.policy
    end = SettleRequest(
        record=record,
        state=State.COMPLETED,
        value=by.request.value,
        keep_ms=policy.settled_keep_ms,
        restore=False,
        note=by.note,
    )
    if not settling.end_record(by.store, end):
        return Outcome.CHANGED
    by.report(signals.settled, record, state=State.COMPLETED)
    return Outcome.DONE


def _fail(by: Operator, record: Record) -> Outcome:
    error = FailedByOperator(f"{record.identity} was settled as failed by an operator.")
    if not settling.fail_record(by.app, by.store, record, error, note=by.note):
        return Outcome.CHANGED
    by.report(signals.settled, record, state=State.FAILED, error=error)
    return Outcome.DONE
