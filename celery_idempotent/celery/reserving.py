"""``idempotency_publish_once``: a key is reserved before its message is sent, and the first call answers all others.

::

    first call    reserve: Reserved ─ send ─────────────────── worker: claim, run, settle
    second call           reserve: Held ─ AsyncResult(first)          │
    third call                                               reserve: Settled ─ AsyncResult(first)

Should the producer die between the reservation and the sending, the reservation's deadline passes, and the next call
sends under the same task id. Where the store fails the call is sent unreserved: the worker's claim guards the run.
"""

from __future__ import annotations

import logging
from datetime import datetime, timezone
from functools import partial
from typing import Any, Protocol

from celery_idempotent import signals
from celery_idempotent.celery.definition import DefinedTask, Definition
from celery_idempotent.celery.typed import Options, Result
from celery_idempotent.errors import FingerprintMismatch, IdempotencyError
from celery_idempotent.events import Line
from celery_idempotent.keys.stamp import Identified, read_stamp, with_stamp
from celery_idempotent.records import (
    Held,
    Mismatched,
    Record,
    Reservation,
    Reserved,
    ReserveRequest,
    Settled,
    State,
)
from celery_idempotent.stores import Store, get_store

logger = logging.getLogger(__name__)

_UNRESERVED = Line(logging.WARNING, "%(task)s is published unreserved: %(error)s")

#: A reservation whose message did not start in time (after its ETA, if it has one) counts as lost.
RESERVED_MS = 60_000


class SendCall(Protocol):
    """Sends one call, whose arguments it has already."""

    def __call__(self, **options: Any) -> Result:
        """Send it with these options of ``apply_async``."""
        ...


def reserve_and_send(
    task: DefinedTask,
    definition: Definition,
    identified: Identified,
    send_call: SendCall,
    options: Options,
) -> Result:
    """Reserve the key of a call and send it; return the first call's result if there was one.

    Raises:
        FingerprintMismatch: if the key was reserved or used with other arguments.
    """
    store = get_store(task.app)
    identity, task_id = identified.identity, options["task_id"]
    report = partial(definition.reporter.report, store=store)
    try:
        answer = _reserve(store, definition, identified, options)
    except IdempotencyError as error:
        # The worker's claim still guards the run: a second message does no harm.
        report(signals.store_failed, identity, task_id, error=error, line=_UNRESERVED)
        return send_call(**options)
    match answer:
        case Held(record, left_ms) if left_ms or record.state is not State.PROCESSING:
            # The first message is on its way, or its run is at work.
            report(signals.replayed, identity, task_id, record)
            return task.AsyncResult(record.task_id)
        case Held(record, _):
            # The lease ran out: the worker never came back, and with early acks the message is gone, too.
            _use_task_id(options, record.task_id)
            return send_call(**options)
        case Settled(record, _):
            # FAILED, or completed by an operator, who writes no result under the first id: then a worker answers this
            # message from the record.
            if record.state is State.COMPLETED and not record.settled_by_operator:
                report(signals.replayed, identity, task_id, record)
                return task.AsyncResult(record.task_id)
            return send_call(**options)
        case Mismatched(record):
            report(signals.mismatched, identity, task_id, record)
            raise FingerprintMismatch(
                f"{record.identity} belongs to task {record.task_id}, which was called with other arguments: a key "
                "stands for one intention."
            )
        case Reserved(record):
            _use_task_id(options, record.task_id)
            try:
                sent = send_call(**options)
            except BaseException:
                give_back(store, record)
                raise
            report(signals.reserved, identity, record.task_id, record, state=State.QUEUED)
            return sent


def _reserve(
    store: Store, definition: Definition, identified: Identified, options: Options
) -> Reservation:
    """Reserve the key; a mark that a retention of 0 left is forgotten first, if it is no answer for this call."""
    policy = definition.policy
    while True:
        answer = store.reserve(
            ReserveRequest(
                identity=identified.identity,
                fingerprint=identified.fingerprint,
                task_id=options["task_id"],
                deadline_ms=lost_after_ms(options),
                keep_ms=policy.keep_ms,
            )
        )
        if not isinstance(answer, (Settled, Mismatched)) or not policy.forgets(answer.record):
            return answer
        store.forget_mark(answer.record.identity, token=answer.record.token)


def give_back(store: Store, record: Record) -> None:
    """Release a reservation whose message is not sent.

    Nothing is raised if the store fails: the caller has an error of its own to raise, and the reservation ends anyway.
    """
    try:
        store.release(record.identity, token=record.token)
    except IdempotencyError as error:
        logger.warning(
            "idempotency: could not release the reservation of %s, its deadline will end it: %s",
            record.identity,
            error,
        )


def _use_task_id(options: Options, task_id: str) -> None:
    """Send a call under the task id that its key has already; its stamp names that id, too."""
    stamped = read_stamp(options["headers"], options["task_id"])
    options["task_id"] = task_id
    options["headers"] = with_stamp(options["headers"], task_id, more=stamped)


def lost_after_ms(options: Options) -> int:
    """Return in how many milliseconds a message that is published now with these options counts as lost."""
    wait = 0.0
    eta = options.get("eta")
    if options.get("countdown"):
        wait = float(options["countdown"])
    elif isinstance(eta, (datetime, str)):
        eta = datetime.fromisoformat(eta) if isinstance(eta, str) else eta
        now = datetime.now(timezone.utc)
        wait = ((eta if eta.tzinfo else eta.replace(tzinfo=timezone.utc)) - now).total_seconds()
    return RESERVED_MS + max(int(wait * 1000), 0)
