"""What an operator may do to a record: release, forget, fail, requeue; never by accident to one that has a live owner.

What was decided about one record is never done to another: an operation names the token and the state that the operator
saw, and does nothing where the key has moved on since.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Literal

from celery_idempotent import signals
from celery_idempotent.errors import FailedByOperator
from celery_idempotent.policy import Policy
from celery_idempotent.reaper import REQUEUE_MS, definition_of, event_of, send_again, task_of
from celery_idempotent.records import Identity, Record, Selection, State
from celery_idempotent.signals import emit
from celery_idempotent.stores import get_store
from celery_idempotent.tally import tally

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores import Store

__all__ = ["OPERATIONS", "Operation", "Outcome", "clock_ms", "is_live", "offered", "operate"]

logger = logging.getLogger(__name__)

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


def clock_ms(store: Store) -> int:
    """Return the time by the store's clock."""
    # The shortest question whose answer tells the time, with any store.
    return store.list(Selection(states=frozenset({State.QUEUED})), limit=1, look_at=1).now_ms


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
) -> Outcome:
    """Do one of :data:`OPERATIONS` to the record that has this token and this state.

    A record whose owner is live is left alone, unless this is forced: then its owner loses the key, and may still be
    at work. Whoever takes the key next gets a larger token.

    Raises:
        StoreUnavailable: if the store did not answer; what was asked for may have been done.
    """
    store = get_store(app)
    record = store.get(identity)
    if record is None or (record.token, record.state) != (token, state):
        return Outcome.CHANGED
    if operation not in offered(record):
        return Outcome.CHANGED
    if not force and is_live(record, clock_ms(store)):
        return Outcome.LIVE
    match operation:
        case "release":
            outcome = _release(app, store, record)
        case "requeue":
            outcome = _requeue(app, store, record)
        case "fail":
            outcome = _fail(app, store, record)
        case "forget":
            outcome = _if(store.forget(identity, token=token))
    if outcome is Outcome.DONE:
        logger.warning("idempotency: an operator chose to %s %s", operation, identity)
    tally.write()
    return outcome


def _if(done: bool) -> Outcome:
    return Outcome.DONE if done else Outcome.CHANGED


def _release(app: Celery, store: Store, record: Record) -> Outcome:
    if not store.release(record.identity, token=record.token):
        return Outcome.CHANGED
    emit(signals.released, None, event_of(record))
    tally.add(store, task_of(app, record), "released")
    return Outcome.DONE


def _requeue(app: Celery, store: Store, record: Record) -> Outcome:
    # A claim that is still held has to end first, and with this token only.
    if record.state is State.PROCESSING:
        interrupted = store.interrupt(record.identity, token=record.token)
        if interrupted is None:
            return Outcome.CHANGED
    queued = store.requeue(record.identity, deadline_ms=REQUEUE_MS)
    if queued is None:
        return Outcome.CHANGED
    return Outcome.DONE if send_again(app, queued, None) else Outcome.UNSENT


def _fail(app: Celery, store: Store, record: Record) -> Outcome:
    if record.state is State.PROCESSING:
        # Only a claim with this token is interrupted; whereas settle would also write where there is no record,
        # and so bring back a key that its owner released a moment ago.
        interrupted = store.interrupt(record.identity, token=record.token)
        if interrupted is None:
            return Outcome.CHANGED
        record = interrupted
    error = FailedByOperator(f"{record.identity} was settled as failed by an operator.")
    definition = definition_of(app, record)
    keep_ms = Policy().failed_keep_ms if definition is None else definition.policy.failed_keep_ms
    value = None if definition is None else definition.codec.dump_error(error)
    store.settle(record, state=State.FAILED, value=value, keep_ms=keep_ms)
    # The owner may have settled it first, and then that end stays.
    found = store.get(record.identity)
    if found is None or found.token != record.token or found.state is not State.FAILED:
        return Outcome.CHANGED
    emit(signals.settled, None, event_of(record, error))
    tally.add(store, task_of(app, record), "settled")
    return Outcome.DONE
