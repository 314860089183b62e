"""What an operator may do to a record: release, requeue, complete, fail, forget, from code, CLI and admin alike.

What was decided about one record is never done to another: an operation names the token and the state that the operator
saw, and does nothing where the key has moved on since::

    operator   look: order-17 is FAILED, token 7 ─ ask ─────────────────────── forget, if FAILED with token 7: CHANGED
    worker                                           claim: PROCESSING, token 8

Each is reported once: a counter, a line of the log, an event with who and why, an entry in Django's admin log.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from celery_idempotent import signals
from celery_idempotent.celery import sweep
from celery_idempotent.celery.definition import definition_of
from celery_idempotent.errors import FailedByOperator, IdempotencyError, InProgress
from celery_idempotent.events import Details, Line, printable, worker_name
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.records import Identity, Record, State, Stored
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyCelery
    from celery_idempotent.stores import Store

logger = logging.getLogger(__name__)

Operation = Literal["release", "requeue", "complete", "fail", "forget"]

#: So many characters of a reason pages and commands take, and so many of a note are stored.
LONGEST_REASON, _LONGEST_NOTE = 500, 600

#: After so many records in a row for which the store did not answer no further one is tried: each takes a time-out.
_SILENT = 2


class Meaning(NamedTuple):
    """An operation in words: what it makes of a record, its effect, why it may mean nothing, and for which it does.

    ``repeats``: what took effect before may be done a second time.
    """

    done: str
    effect: str
    refusal: str
    applies: Callable[[Record], bool]
    repeats: bool = True


#: All of them, in the order in which they are offered.
OPERATIONS: Final[Mapping[Operation, Meaning]] = {
    "release": Meaning(
        "released",
        "ends the claim: the next delivery or call runs.",
        "only a QUEUED or a PROCESSING record can be released.",
        lambda record: record.state in {State.QUEUED, State.PROCESSING},
    ),
    "requeue": Meaning(
        "requeued",
        "publishes the message that the record keeps again, under the same task id.",
        "only an INTERRUPTED or a PROCESSING record that keeps its message"
        ' (idempotency_on_stale="requeue") can be requeued. Calling the task again has the same effect.',
        lambda record: (
            record.state in {State.PROCESSING, State.INTERRUPTED} and record.message is not None
        ),
    ),
    "complete": Meaning(
        "completed",
        "settles it COMPLETED with the value that you give: nothing runs, and callers get that value.",
        "only a record that is not COMPLETED, of a task of this app, can be completed. Forget it first.",
        # Not a COMPLETED one: somebody may have got that value.
        lambda record: record.state is not State.COMPLETED,
        repeats=False,
    ),
    "fail": Meaning(
        "failed",
        "settles it FAILED: nothing runs until its retention ends, and callers get FailedByOperator.",
        "only a QUEUED, PROCESSING or INTERRUPTED record can be failed.",
        lambda record: not record.state.settled,
        repeats=False,
    ),
    "forget": Meaning(
        "forgotten",
        "deletes the record with all it knows: the next call runs.",
        "there is no record.",
        lambda _: True,
    ),
}

#: Those that mean the same for many records: a value is that of one key.
ON_MANY: Final[tuple[Operation, ...]] = ("release", "requeue", "fail", "forget")


class Outcome(enum.Enum):
    """How an operation ended, in words."""

    DONE = "done"
    CHANGED = "left alone: it has changed meanwhile"
    LIVE = "left alone: its owner is live"
    UNSENT = "queued, and not published yet: the next sweep after its deadline tries again"


@dataclass(frozen=True, slots=True)
class OperationRequest:
    """What somebody wants done to a record: ``who`` (this process, if no one is named), and why.

    ``force``: also where an owner within its lease holds the key. ``value``: what to complete with, as the task would
    write it. :exc:`ValueError` for a force without a reason.
    """

    operation: Operation
    _: KW_ONLY
    who: str = ""
    reason: str = ""
    force: bool = False
    value: Stored | None = None

    def __post_init__(self) -> None:
        if self.force and not self.reason:
            raise ValueError("to take a key away from a live owner, say why: give a reason.")

    @property
    def note(self) -> str:
        """What the record keeps of it."""
        why = f": {self.reason}" if self.reason else ""
        who = self.who or worker_name(os.getpid())
        return printable(f"{self.operation} by {who}{why}")[:_LONGEST_NOTE]


#: Called with each operation of a named person that was done, or may have been: Django's admin log has a place here.
audit_logs: list[Callable[[Identity, OperationRequest, str], None]] = []


# -- what may be done --------------------------------------------------------------------------------------------------

#: What an operation would do to a record: apply to it; nothing, its owner is live; nothing, it means nothing for it.
Verdict = Literal["apply", "held", "skip"]


def is_live(record: Record, now_ms: int) -> bool:
    """Does an owner within its lease hold the key at ``now_ms`` of the store's clock?"""
    return record.state is State.PROCESSING and not record.stale(now_ms)


def offered(app: AnyCelery, record: Record) -> tuple[Operation, ...]:
    """Return the operations that mean something for a record, as :meth:`Store.get` returns it."""
    found = [each for each, meaning in OPERATIONS.items() if meaning.applies(record)]
    if definition_of(app, record.identity.namespace, load=True) is None and "complete" in found:
        found.remove("complete")  # only a task of this app can write a value
    return tuple(found)


def verdict(app: AnyCelery, operation: Operation, record: Record, now_ms: int) -> Verdict:
    """Say what an operation would do to a record; see :func:`offered`."""
    if operation not in offered(app, record):
        return "skip"
    return "held" if is_live(record, now_ms) else "apply"


# -- to do it ----------------------------------------------------------------------------------------------------------


def operate(
    app: AnyCelery, identity: Identity, request: OperationRequest, *, token: int, state: State
) -> Outcome:
    """Do what is asked for to the record that has this token and this state.

    A record whose owner is live is left alone, unless this is forced: then its owner loses the key, and may still be at
    work. The next claim gets a larger token.

    Raises:
        StoreUnavailable: if the store did not answer; what was asked for may have been done.
        ValueError: for a value with an operation that takes none, or no value to complete with.
    """
    if (request.operation == "complete") is (request.value is None):
        raise ValueError("complete takes a value, and nothing else does")
    store, meaning = get_store(app), OPERATIONS[request.operation]
    record = store.get(identity)
    if record is None or (record.token, record.state) != (token, state):
        return Outcome.CHANGED
    if not meaning.applies(record):
        return Outcome.CHANGED
    live = is_live(record, store.now_ms())
    if live and not request.force:
        return Outcome.LIVE
    message = f"{request.operation.capitalize()}: it may have been done"
    try:
        outcome = _execute(app, store, request, record)
        message = meaning.done.capitalize()
        if outcome is Outcome.UNSENT:
            message += " (its message is not published yet)"
        elif outcome is Outcome.CHANGED:
            message = ""
    finally:
        if message:
            _audit(identity, request, message, live)
    if outcome is not Outcome.CHANGED:
        heartbeat.start()  # which writes the counters
    return outcome


def operate_or_raise(app: Celery, identity: Identity, request: OperationRequest) -> bool:
    """Do what is asked for to whatever record a key has; ``False`` if it has none for which that means something.

    Raises:
        InProgress: if an owner within its lease holds the key, and this is not forced.
        ValueError: as :func:`operate` does.
        StoreUnavailable: if the store did not answer; it may have been done.
    """
    store, operation = get_store(app), request.operation
    while (record := store.get(identity)) and OPERATIONS[operation].applies(record):
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


def operate_on_each(
    app: Celery, request: OperationRequest, records: Iterable[Record]
) -> Iterator[tuple[Record, Outcome | None, str]]:
    """Operate on one record after the other, as it was seen; yield it with its outcome, or ``None`` and the trouble.

    A failure of one does not keep the others, unless the store is silent: then the rest is not tried.
    """
    silent = 0
    for record in records:
        about = request.operation, record.identity
        try:
            outcome = operate(app, record.identity, request, token=record.token, state=record.state)
        except IdempotencyError as error:
            logger.warning("idempotency: %s of %s failed: %s", *about, error)
            yield record, None, str(error)
            silent += 1
            if silent == _SILENT:
                return
        except Exception as error:  # a fault that concerns one record
            logger.exception("idempotency: %s of %s failed", *about)
            yield record, None, f"{type(error).__name__}. The log says more."
        else:
            silent = 0
            yield record, outcome, ""


def _audit(identity: Identity, request: OperationRequest, message: str, live: bool) -> None:
    """Write an entry; an incident does not wait for a log that fails, and its outcome stays what it is."""
    message += ", forced on a live owner" if live else ""
    message += f". Reason: {request.reason}" if request.reason else ""
    for write_entry in audit_logs if request.who else ():
        try:
            write_entry(identity, request, message)
        except Exception as error:  # noqa: BLE001, PERF203  a database fails in its own ways
            logger.warning("idempotency: the admin's log does not have this operation: %s", error)


def _execute(app: Celery, store: Store, request: OperationRequest, record: Record) -> Outcome:
    identity, token, note = record.identity, record.token, request.note
    signal, error = signals.settled, None
    state: State | None = None
    done: Record | bool | None
    match request.operation:
        case "release":
            signal, state = signals.released, State.INTERRUPTED if record.steps else None
            done = store.release(identity, token=token, note=note)
        case "requeue":
            signal, state = signals.requeued, State.QUEUED
            # One write: from then on a sweep publishes what we do not, should we die here or the broker be down.
            done = store.requeue(identity, deadline_ms=sweep.REQUEUE_MS, token=token, note=note)
        case "complete":
            state = State.COMPLETED
            done = sweep.end_record(app, record, request.value, note=note)
        case "fail":
            state = State.FAILED
            error = FailedByOperator(f"{identity} was settled as failed by an operator.")
            done = sweep.end_record(app, record, error, note=note)
        case "forget":
            signal = signals.forgotten
            # The state, too: a run that completed a moment ago is not what was seen.
            done = store.forget(identity, token=token, state=record.state)
    done = done or _find_done(store, record, state, note)
    if not done:
        return Outcome.CHANGED
    past = "forgot" if signal is signals.forgotten else OPERATIONS[request.operation].done
    line = Line(logging.WARNING, f"{{event.who}} {past} {{event.identity}}{{why}}")
    details: Details = {"who": request.who, "reason": request.reason, "line": line}
    if isinstance(done, Record) and signal is signals.requeued:
        # Published here also if a sweep was first: a second copy does no harm, none would take a minute.
        sent = sweep.send_again(app, done, **details)
        return Outcome.DONE if sent else Outcome.UNSENT
    details = {**details, "state": state, "error": error}
    sweep.report_record(app, signal, record, **details)
    return Outcome.DONE


def _find_done(store: Store, seen: Record, state: State | None, note: str) -> Record | None:
    """Return the record as the operation leaves it, although the store says that it did nothing.

    A store that gets no answer asks again by itself, and then finds its own work. ``state`` is what the record is left
    in, ``None`` if it is deleted.
    """
    found = store.get(seen.identity)
    if state is None:
        # A record that was not deleted keeps its beginning, also when it is claimed again.
        return seen if found is None or found.created_ms != seen.created_ms else None
    return found if found is not None and (found.state, found.note) == (state, note) else None
