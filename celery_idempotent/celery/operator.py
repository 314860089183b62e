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
store may have done it, and not have been heard (:meth:`Operator._as_done`).
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, Literal

from celery_idempotent import signals
from celery_idempotent.celery import sweep
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.errors import FailedByOperator
from celery_idempotent.events import Details, Line, printable, worker_name
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Record, SettleRequest, State, Stored

if TYPE_CHECKING:
    from celery import Celery

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
