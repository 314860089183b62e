"""The reservation of a queued request: made, given back, and turned into a message, now or at the COMMIT.

A reservation is *uncommitted* until its message is sure to be sent: until then its deadline is near. After that the
record, or an outbox, has the message, and a sweep sends it should this process die::

    no transaction   reserve (60 s, with the message) ─ send ─ 202
    transaction      reserve (2 s) ─ 202 ─┬─ COMMIT ─ reserve again (60 s, with the message) ─ send
                                          └─ ROLLBACK, or the process dies: the deadline passes, a repetition is queued
    outbox           reserve (2 s), stage the message ─ COMMIT ─ reserve again, as above ─ send, or a sweep sends

On SQLite the reservation is itself part of the transaction.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

from django.db import DatabaseError, transaction
from kombu.exceptions import OperationalError

from celery_idempotent import backoff, signals
from celery_idempotent.celery.reserving import give_back
from celery_idempotent.django.http.orders import QueuedRequest
from celery_idempotent.django.transactions import first_on_commit
from celery_idempotent.errors import STORE_ERRORS
from celery_idempotent.events import Line
from celery_idempotent.http.problems import RequestRefused
from celery_idempotent.records import Record, Reservation, ReserveRequest, State

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: The deadline of a reservation whose transaction may still be rolled back: after a ROLLBACK the key is free then.
UNCOMMITTED_MS = 2_000

#: How long a request tries to reach the store, or waits for another request's COMMIT, in seconds.
REQUEST_RETRY_SECONDS = 3.0

#: The answer whenever something broke: the message may have been sent, and only the reply was lost.
_UNSURE = (
    "It may be queued or not. Send the same request with the same key again: it takes effect once."
)

_FORGOTTEN = Line(
    logging.INFO, "%(identity)s failed, and is reserved anew by a request that tries it again"
)


def reserve_key(queued: QueuedRequest, task_id: str, *, uncommitted: bool) -> Reservation:
    """Reserve the key: with its message, until that counts as lost; ``uncommitted``: without it, for a short time.

    Raises:
        RequestRefused: if the store does not answer.
    """
    message = None if uncommitted else queued.message(task_id)
    return _with_retries(
        queued,
        lambda: queued.store.reserve(
            ReserveRequest(
                identity=queued.identified.identity,
                fingerprint=queued.identified.fingerprint,
                task_id=task_id,
                deadline_ms=UNCOMMITTED_MS if uncommitted else queued.lost_after_ms,
                keep_ms=queued.definition.policy.keep_ms,
                message=message,
                uncommitted=uncommitted,
            )
        ),
    )


def forget_failure(queued: QueuedRequest, record: Record) -> None:
    """Delete a FAILED record that the request tries again; the record of a later attempt stays."""
    identity = record.identity
    if _with_retries(
        queued, lambda: queued.store.forget(identity, token=record.token, state=record.state)
    ):
        queued.report(signals.forgotten, record, line=_FORGOTTEN)


def _with_retries(queued: QueuedRequest, verb: Callable[[], T]) -> T:
    """Ask the store, for a few seconds: each verb may be repeated after an answer that was lost."""
    try:
        return backoff.persist(verb, until=time.monotonic() + REQUEST_RETRY_SECONDS)
    except STORE_ERRORS as error:
        queued.report(signals.store_failed, error=error)
        raise RequestRefused("store_unavailable", _UNSURE) from error


def queue_message(queued: QueuedRequest, record: Record, *, in_transaction: bool) -> None:
    """Send the message, now or after the COMMIT.

    Raises:
        RequestRefused: if the broker, or the database of the outbox, does not take it.
    """
    try:
        if in_transaction:
            _stage_message(queued, record)
        elif queued.outbox_alias is None:
            queued.send(record.task_id)
            queued.report(signals.reserved, record, state=State.QUEUED)
        else:
            # The outbox has it from the COMMIT on: it is sent now, or by a sweep once the broker is back.
            with transaction.atomic(using=queued.outbox_alias):
                _stage_message(queued, record)
    except BaseException as error:
        give_back(queued.store, record)
        # A transaction that is not ours must end with the error of its database.
        if in_transaction or not isinstance(error, (OperationalError, DatabaseError, OSError)):
            raise
        logger.warning("idempotency: %s is not queued: %s", record.identity, type(error).__name__)
        raise RequestRefused("not_queued", _UNSURE) from error


def _stage_message(queued: QueuedRequest, record: Record) -> None:
    if queued.outbox_alias is not None:
        queued.stage(record.task_id, queued.outbox_alias)
    commit = partial(_at_commit, queued.as_now(), record)
    first_on_commit(transaction.get_connection(queued.using), commit)


def _at_commit(queued: QueuedRequest, record: Record) -> None:
    """Send the message, unless an outbox does; the record gets it first, with the usual deadline."""
    try:
        reserve_key(queued, record.task_id, uncommitted=False)
        uncommitted = False
    except RequestRefused:  # the reservation stands, with less time
        uncommitted = True
    try:
        if queued.outbox_alias is None:  # else the outbox sends it
            queued.send(record.task_id)
        queued.report(signals.reserved, record, state=State.QUEUED)
    except Exception:
        logger.exception("idempotency: %s is committed and not queued", record.identity)
        if uncommitted or queued.message(record.task_id) is None:
            # No sweep can send it. A client that polls gets 404, and sends the request again.
            give_back(queued.store, record)
