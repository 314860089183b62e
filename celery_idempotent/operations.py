"""What an operator may do to a record: release, forget, fail, requeue; never by accident to one that has a live owner.

What was decided about one record is never done to another: an operation names the token and the state that the operator
saw, and does nothing where the key has moved on since.
"""

from __future__ import annotations

import enum
import logging
from typing import TYPE_CHECKING, Literal

from celery_idempotent import signals
from celery_idempotent.errors import FailedByOperator, InvalidOption
from celery_idempotent.policy import Policy
from celery_idempotent.reaper import REQUEUE_MS, definition_of, event_of, send_again, task_of
from celery_idempotent.records import Identity, Record, Selection, State, Stored
from celery_idempotent.serializers import NotStored, Serializer
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
            # The state, too: a run that completed a moment ago is not what was seen.
            outcome = _if(store.forget(identity, token=token, state=state))
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
    # One write: from then on a sweep publishes what we do not, should we die here or the broker be down.
    queued = store.requeue(record.identity, deadline_ms=REQUEUE_MS, token=record.token)
    if queued is None:
        return Outcome.CHANGED
    return Outcome.DONE if send_again(app, queued, None) else Outcome.UNSENT


def _fail(app: Celery, store: Store, record: Record) -> Outcome:
    error = FailedByOperator(f"{record.identity} was settled as failed by an operator.")
    definition = definition_of(app, record)
    keep_ms = Policy().failed_keep_ms if definition is None else definition.policy.failed_keep_ms
    value = _told(app, error) if definition is None else definition.codec.dump_error(error)
    # One write, to the record with this token and to no other. Not restored: a key that was claimed and released a
    # moment ago has no record, and is not to be failed for what it was before.
    if not store.settle(record, state=State.FAILED, value=value, keep_ms=keep_ms, restore=False):
        return Outcome.CHANGED
    # The owner may have settled it first, and then that end stays.
    found = store.get(record.identity)
    if found is None or (found.token, found.state) != (record.token, State.FAILED):
        return Outcome.CHANGED
    if found.value != value:
        return Outcome.CHANGED
    emit(signals.settled, None, event_of(record, error))
    tally.add(store, task_of(app, record), "settled")
    return Outcome.DONE


def _told(app: Celery, error: FailedByOperator) -> Stored | None:
    """Serialize the error of a record whose task is unknown, or that is a view's, as a result backend would."""
    accept = tuple(app.conf.result_accept_content or app.conf.accept_content)
    told = {
        "exc_type": type(error).__name__,
        "exc_module": type(error).__module__,
        "exc_message": str(error),
    }
    try:
        stored = Serializer("json", accept).dump(told, max_bytes=None)
    except InvalidOption:  # what nobody could read
        return None
    return None if isinstance(stored, NotStored) else stored
