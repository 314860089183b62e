"""Operations on a record: release, requeue, complete, fail and forget, from code, CLI and admin alike.

An operation names the token and the state that the operator saw, and does nothing once the key has moved on::

    operator   look: order-17 is FAILED, token 7 ─ ask ─────────────────────── forget, if FAILED with token 7: CHANGED
    worker                                           claim: PROCESSING, token 8
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from celery_idempotent import signals
from celery_idempotent.celery import sweep
from celery_idempotent.celery.definition import definition_of
from celery_idempotent.errors import FailedByOperator, IdempotencyError, InProgress
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.records import Identity, Record, State, Stored
from celery_idempotent.signals import Call, Details, Line, printable, worker_name
from celery_idempotent.stores import get_store
from celery_idempotent.stores.fields import Unreadable

if TYPE_CHECKING:
    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

Operation = Literal["release", "requeue", "complete", "fail", "forget"]

#: After this many time-outs of the store in a row, the other records are not tried.
_SILENT = 2


class Meaning(NamedTuple):
    """An operation, the states it applies to, and the one it ``leaves``."""

    done: str
    effect: str
    refusal: str
    states: frozenset[State]
    leaves: State | None = None

    def applies(self, record: Record) -> bool:
        """Does it apply to this record, live or not?"""
        lacks_message = self.leaves is State.QUEUED and record.message is None
        return record.state in self.states and not lacks_message


#: In the order in which they are offered.
OPERATIONS: Final[Mapping[Operation, Meaning]] = {
    "release": Meaning(
        "released",
        "ends the claim: the next delivery or call runs.",
        "only a QUEUED or a PROCESSING record can be released.",
        frozenset({State.QUEUED, State.PROCESSING}),
    ),
    "requeue": Meaning(
        "requeued",
        "runs it again: publishes the stored message, under the same task id.",
        "only a FAILED, INTERRUPTED or PROCESSING record that keeps its message (idempotency_keep_message, or"
        ' idempotency_on_stale="requeue") can be requeued. Else forget it if it is FAILED, and call the task again.',
        frozenset({State.PROCESSING, State.INTERRUPTED, State.FAILED}),
        State.QUEUED,
    ),
    "complete": Meaning(
        "completed",
        "settles the record COMPLETED with the value that you give: nothing runs, and callers get that value.",
        "only a record of a task of this app can be completed.",
        frozenset(State),
        State.COMPLETED,
    ),
    "fail": Meaning(
        "failed",
        "settles the record FAILED: nothing runs until its retention ends, and callers get FailedByOperator.",
        "only a QUEUED, PROCESSING or INTERRUPTED record can be failed.",
        frozenset({State.QUEUED, State.PROCESSING, State.INTERRUPTED}),
        State.FAILED,
    ),
    "forget": Meaning(
        "forgotten",
        "deletes the record with its steps and its result: the next call runs.",
        "there is no record.",
        frozenset(State),
    ),
}

#: All but complete: a value is that of one key.
ON_MANY: Final[tuple[Operation, ...]] = ("release", "requeue", "fail", "forget")


class Outcome(enum.Enum):
    """How an operation ended, in words."""

    DONE = "done"
    CHANGED = "left alone: it has changed since"
    LIVE = "left alone: its owner is live"
    UNSENT = "queued, but not published: the sweep after its deadline tries again"
    UNKNOWN = "it may have been done, or not"


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """An operation, by ``who`` (default: this process), and why.

    ``force``: also on a live owner or over an end; :exc:`ValueError` without a reason. ``value``: to complete, stored.
    """

    operation: Operation
    _: KW_ONLY
    who: str = ""
    reason: str = ""
    force: bool = False
    value: Stored | None = None

    def __post_init__(self) -> None:
        if self.force and not self.reason:
            raise ValueError("to force it, say why: give a reason.")

    def check(self, record: Record) -> None:
        """Raise :exc:`ValueError` if this would replace how a record ended without being forced."""
        if self.operation == "complete" and record.state.is_final and not self.force:
            end = f"it is {record.state.value}, and callers may have got that result or error"
            raise ValueError(f"{end}: to replace it, force it and give a reason.")

    @property
    def note(self) -> str:
        """The line that the record keeps."""
        why = f": {self.reason}" if self.reason else ""
        who = self.who or worker_name(os.getpid())
        return printable(f"{self.operation} by {who}{why}")[:600]


#: Called with each operation of a named person that was done, or may have been.
audit_logs: list[Callable[[Identity, OperationRequest, str], None]] = []

#: An operation applies to a record; it has to be forced; it does not apply.
Verdict = Literal["apply", "held", "skip"]


def is_live(record: Record, now_ms: int) -> bool:
    """Does an owner within its lease hold the key at ``now_ms`` of the store's clock?"""
    return record.state is State.PROCESSING and not record.stale(now_ms)


def verdict(app: AnyCelery, operation: Operation, record: Record, now_ms: int) -> Verdict:
    """Return whether an operation applies to a record, as :meth:`Store.get` returns it."""
    if not OPERATIONS[operation].applies(record):
        return "skip"
    # Only a task of this app can write a value.
    if operation == "complete" and not definition_of(app, record.identity.namespace, load=True):
        return "skip"
    return "held" if is_live(record, now_ms) else "apply"


def offered(app: AnyCelery, record: Record) -> list[Operation]:
    """Return the operations that apply to a record, forced or not."""
    return [each for each in OPERATIONS if verdict(app, each, record, 0) != "skip"]


def operate(
    app: AnyCelery, identity: Identity, request: OperationRequest, *, token: int, state: State
) -> Outcome:
    """Operate on the record with this token and this state.

    A live owner is left alone, unless this is forced: then it loses the key, and may still be running.

    Raises:
        StoreUnavailable: if the store did not answer; the operation may have been done.
        ValueError: if operation and value do not go together, or if it would replace an end unforced.
    """
    if (request.operation == "complete") is (request.value is None):
        raise ValueError("complete needs a value, and no other operation takes one")
    store = get_store(app)
    record = store.get(identity)
    if record is None or (record.token, record.state) != (token, state):
        return Outcome.CHANGED
    if not OPERATIONS[request.operation].applies(record):
        return Outcome.CHANGED
    request.check(record)
    live = is_live(record, store.now_ms())
    if live and not request.force:
        return Outcome.LIVE
    outcome = Outcome.UNKNOWN
    try:
        outcome = _execute(app, store, request, record)
    finally:
        if outcome is not Outcome.CHANGED:
            _audit(identity, request, outcome, live)
            heartbeat.start()  # which writes the counters
    return outcome


def operate_or_raise(app: AnyCelery, identity: Identity, request: OperationRequest) -> bool:
    """Operate on the record of a key, whatever its token; ``False`` if it does not apply.

    A forced ``forget`` also deletes a record that cannot be read.

    Raises:
        InProgress: if a live owner holds the key, and this is not forced.
        ValueError, StoreUnavailable: as :func:`operate`.
    """
    store, operation = get_store(app), request.operation
    if operation == "forget" and request.force:
        try:
            store.get(identity)
        except Unreadable:
            if not store.discard(identity):
                return False
            call = Call(name=identity.namespace, sender=None, store=store, identity=identity)
            signals.report(call, signals.forgotten, who=request.who, reason=request.reason)
            _audit(identity, request, Outcome.DONE, live=False)
            return True
    while (record := store.get(identity)) and OPERATIONS[operation].applies(record):
        outcome = operate(app, identity, request, token=record.token, state=record.state)
        if outcome is Outcome.LIVE:
            raise InProgress(
                f"{identity} is held by {record.owner}, and was left alone ({operation}): wait for its end, or give"
                " force=True and a reason.",
                record.task_id,
            )
        if outcome is not Outcome.CHANGED:  # else look again
            return True
    if operation == "forget":
        store.forget(identity, token=0)  # of no record, but a cache may have a copy left
    return False


def operate_on_each(
    app: AnyCelery, request: OperationRequest, records: Iterable[Record]
) -> Iterator[tuple[Record, Outcome, str]]:
    """Operate on each record as it was seen, until the store is silent; yield it with its outcome, also in words."""
    silent, unknown = 0, Outcome.UNKNOWN
    for record in records:
        about = request.operation, record.identity
        try:
            outcome = operate(app, record.identity, request, token=record.token, state=record.state)
        except IdempotencyError as error:
            logger.warning("idempotency: %s of %s failed: %s", *about, error)
            yield record, unknown, f"{unknown.value}: {error}"
            if (silent := silent + 1) == _SILENT:
                return
        except Exception as error:  # a fault that concerns one record
            logger.exception("idempotency: %s of %s failed", *about)
            yield record, unknown, f"{unknown.value}: {type(error).__name__}. The log says more."
        else:
            silent, done = 0, outcome is Outcome.DONE
            yield record, outcome, OPERATIONS[request.operation].done if done else outcome.value


def _audit(identity: Identity, request: OperationRequest, outcome: Outcome, live: bool) -> None:
    """Write an entry; a log that fails changes no outcome."""
    entry = OPERATIONS[request.operation].done.capitalize()
    if outcome is Outcome.UNKNOWN:
        entry = f"{request.operation.capitalize()}: it may have been done"
    entry += " (its message is not published yet)" if outcome is Outcome.UNSENT else ""
    entry += ", forced on a live owner" if live else ""
    entry += f". Reason: {request.reason}" if request.reason else ""
    for write_entry in audit_logs if request.who else ():
        try:
            write_entry(identity, request, entry)
        except Exception as error:  # noqa: BLE001, PERF203  a database fails in its own ways
            logger.warning("idempotency: the admin's log lacks this operation: %s", error)


def _execute(app: AnyCelery, store: Store, request: OperationRequest, record: Record) -> Outcome:
    identity, token, note = record.identity, record.token, request.note
    meaning = OPERATIONS[request.operation]
    signal, state, past, error = signals.settled, meaning.leaves, meaning.done, None
    done: Record | bool | None
    match request.operation:
        case "release":
            signal, state = signals.released, State.INTERRUPTED if record.steps else None
            done = store.release(identity, token=token, note=note)
        case "requeue":
            signal = signals.requeued
            # One write: from then on a sweep publishes what we do not, should we die here or the broker be down.
            # The state, too: a run that failed a moment ago is not what was seen.
            again = partial(store.requeue, identity, deadline_ms=sweep.REQUEUE_MS, note=note)
            done = again(token=token, state=record.state)
        case "complete" | "fail" as operation:
            if operation == "fail":
                error = FailedByOperator(f"{identity} was settled as failed by an operator.")
            done = sweep.end_record(app, record, error or request.value, note=note)
        case "forget":
            signal, past = signals.forgotten, "forgot"
            # Likewise of a run that completed.
            done = store.forget(identity, token=token, state=record.state)
    done = done or _find_done(store, record, state, note)
    if not done:
        return Outcome.CHANGED
    line = Line(logging.WARNING, f"{{event.who}} {past} {{event.identity}}{{why}}")
    details: Details = {"who": request.who, "reason": request.reason, "line": line}
    if isinstance(done, Record) and signal is signals.requeued:
        # Published here also if a sweep was first: a second copy does no harm, none would take a minute.
        sent = sweep.send_again(app, done, **details)
        return Outcome.DONE if sent else Outcome.UNSENT
    details |= {"state": state, "error": error}
    sweep.report_record(app, signal, record, **details)
    return Outcome.DONE


def _find_done(store: Store, seen: Record, state: State | None, note: str) -> Record | None:
    """Return the record in the ``state`` that the operation left: a store that asks twice finds its own work done."""
    found = store.get(seen.identity)
    if state is None:
        # A record that was not deleted keeps its beginning through further claims.
        return seen if found is None or found.created_ms != seen.created_ms else None
    return found if found is not None and (found.state, found.note) == (state, note) else None
