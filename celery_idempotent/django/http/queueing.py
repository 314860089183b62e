"""``enqueue``: from a request to a task under one key, with an answer that is the same however often it is asked for.

::

    POST ─ reserve ─┬─ Reserved ──▶ outbox, or publish after COMMIT ──▶ 202, Location: its status
                    ├─ Held ──────▶ the same 202, or 409
                    ├─ Settled ───▶ 200 with the result │ 500, 504 with the error │ retryable: forgotten, reserved anew
                    └─ Mismatched ▶ 422

A 202 is a promise, and outlives the process that gives it: the message is stored with the record, or in the outbox,
and a sweep sends it should nobody else do so. A reservation of a transaction that may still be rolled back promises
nothing, and its deadline is near.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DatabaseError, transaction
from django.http import HttpResponse, JsonResponse
from kombu.exceptions import OperationalError

from celery_idempotent import signals
from celery_idempotent.celery.reserving import RESERVED_MS
from celery_idempotent.django.http.describing import describe, failure_of
from celery_idempotent.django.http.messages import REPLAYED
from celery_idempotent.django.http.options import HttpOptions, http_options
from celery_idempotent.django.http.orders import Order, read_order
from celery_idempotent.django.http.problems import RequestRefused, problem
from celery_idempotent.django.testcases import in_testcase
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol import backoff, key_change
from celery_idempotent.records import (
    Held,
    Mismatched,
    Record,
    Reservation,
    Reserved,
    Settled,
    State,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: A reservation inside a transaction, which may be rolled back without a word: how long others wait for its end.
UNCOMMITTED_MS = 10_000

#: How long the store is given to answer, and another request to commit, in seconds.
PATIENCE = 3.0

#: What is true whenever something broke on the way: the request may have been received, and its answer lost.
_UNSURE = (
    "It may be queued or not. Send the same request with the same key again: it takes effect once."
)


def enqueue(
    request: Any,
    task: Any,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    scope: object = None,
    using: str | None = None,
    **publish: Any,
) -> HttpResponse:
    """Let ``task`` do the work of ``request``, once for each key of the caller, and return the answer.

    Args:
        request: the request; its ``Idempotency-Key`` is the task's key.
        task: an ``IdempotentTask``. Its fingerprint of the arguments tells another request with the same key.
        args: for the task.
        kwargs: for the task.
        scope: whose key it is: a value, or a function of the request; by default the caller.
        using: the database whose COMMIT the message waits for, inside a transaction; ``"default"`` if not given.
        publish: options of ``apply_async``.

    Raises:
        InvalidKey: if an argument has no canonical form (``idempotency_fingerprint`` says which of them count).
        InvalidOption: for an option of ``apply_async`` that is not the caller's to choose.
        SynchronousOnlyOperation: in a coroutine, which has :func:`aenqueue`.
    """
    _refuse_event_loop()
    options: HttpOptions = getattr(request, "idempotency_options", None) or http_options()
    try:
        order = read_order(
            request,
            task,
            args,
            kwargs or {},
            scope=scope,
            using=using,
            publish=publish,
            options=options,
        )
        if order is None:
            return JsonResponse({"state": State.QUEUED.value}, status=202)
        in_transaction = transaction.get_connection(using).in_atomic_block
        return _answer(
            order, _claim(order, in_transaction=in_transaction), in_transaction=in_transaction
        )
    except RequestRefused as refusal:
        return refusal.response(options.docs_url)


#: :func:`enqueue` for coroutines: it works in the thread of the request, and the event loop goes on.
aenqueue: Callable[..., Awaitable[HttpResponse]] = sync_to_async(enqueue, thread_sensitive=True)


def _refuse_event_loop() -> None:
    if os.environ.get("DJANGO_ALLOW_ASYNC_UNSAFE"):
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise SynchronousOnlyOperation(
        "enqueue() asks the store and the broker, and would stop the event loop meanwhile: in a coroutine, "
        "`await aenqueue(...)`."
    )


def _claim(order: Order, *, in_transaction: bool) -> Reserved | Held | Settled:
    """Reserve the key, or find the first request's record.

    The store is asked again while its answer may still change: the first request's reservation is not committed yet, or
    its failure may be tried again. ``in_transaction``: this request has a transaction open.

    Raises:
        RequestRefused: if the key is another request's, the store does not answer, or nobody commits in time.
    """
    task_id = str(uuid.uuid4())
    give_up, attempts = time.monotonic() + PATIENCE, 0
    while True:
        match _reserve(order, task_id, promised=not in_transaction and order.outbox is None):
            case Reserved(record) if record.task_id != task_id:
                # The earlier sender vanished: reserve again under the task id that it chose, so both messages have one.
                task_id = record.task_id
            case Held(record, _) if _may_be_rolled_back(order, record):
                attempts += 1
                if not backoff.pause(attempts, until=give_up, first=0.02):
                    raise _in_progress(order, record, "It is not queued yet. Ask again later.")
            case Settled(record, _) if _is_retryable(order, record):
                # Forget this failure only: if another request already did, the next round finds its reservation.
                _patiently(order, partial(_forget, order, record))
            case Mismatched(record):
                order.report(signals.mismatched, record)
                raise RequestRefused(
                    "idempotency_key_reused",
                    "It was sent before with other content. A key stands for one intention: use a new one.",
                )
            case found:
                return found


def _answer(
    order: Order, found: Reserved | Held | Settled, *, in_transaction: bool
) -> HttpResponse:
    """Queue what was reserved, and say where the operation is."""
    match found:
        case Reserved(record):
            _queue(order, record, in_transaction=in_transaction)
            return _status_of(order, record, replayed=False)
        case Held(record, _) if order.options.on_pending == "refuse":
            raise _in_progress(order, record, "Ask its status resource, or again later.")
        case Settled(record, _) if record.state is State.FAILED:
            order.report(signals.replayed, record)
            failure = failure_of(record, order.task, order.options)
            answer = problem(
                failure.code,
                failure.detail,
                retryable=False,
                docs_url=order.options.docs_url,
                state=record.state.value,
                error=failure.error,
            )
            answer[REPLAYED] = "true"
            return answer
        case _:
            order.report(signals.replayed, found.record)
            return _status_of(order, found.record, replayed=True)


def _may_be_rolled_back(order: Order, record: Record) -> bool:
    """Is this the reservation of a transaction that is still open, and does the request wait for its end?"""
    return (
        order.options.on_pending == "accept"
        and _uncommitted(record)
        and not in_testcase(transaction.get_connection(order.using))
    )


def _is_retryable(order: Order, record: Record) -> bool:
    failed = record.state is State.FAILED
    return failed and failure_of(record, order.task, order.options).retryable


def _in_progress(order: Order, record: Record, advice: str) -> RequestRefused:
    order.report(signals.conflicted, record)
    return RequestRefused(
        "request_in_progress",
        f"The first request with this key is still being worked on. {advice}",
        retry_after=order.options.retry_after,
    )


def _uncommitted(record: Record) -> bool:
    """Is this a reservation that may be rolled back? It is the only one that is due so soon."""
    return (
        record.state is State.QUEUED
        and record.deadline_ms is not None
        and record.deadline_ms - record.updated_ms < RESERVED_MS
    )


def _reserve(order: Order, task_id: str, *, promised: bool) -> Reservation:
    """Reserve the key; ``promised``: with the message, to be sent whatever becomes of this process."""
    message = order.message(task_id) if promised else None
    return _patiently(
        order,
        lambda: key_change.reserve(
            order.store,
            order.identified,
            task_id=task_id,
            deadline_ms=order.patience_ms if promised else UNCOMMITTED_MS,
            keep_ms=order.definition.policy.keep_ms,
            message=message,
        ),
    )


def _forget(order: Order, record: Record) -> bool:
    return order.store.forget(record.identity, token=record.token, state=record.state)


def _patiently(order: Order, verb: Callable[[], T]) -> T:
    """Ask the store, again and again for a while: each verb may be repeated."""
    try:
        return backoff.persist(verb, until=time.monotonic() + PATIENCE)
    except (StoreUnavailable, StoreMisconfigured) as error:
        order.report(signals.store_failed, error=error)
        raise RequestRefused(
            "store_unavailable",
            _UNSURE,
            retry_after=order.options.retry_after,
        ) from error


def _queue(order: Order, record: Record, *, in_transaction: bool) -> None:
    """Send the message, now or after the COMMIT."""
    if in_transaction:
        _stage(order, record)
        return
    try:
        if order.outbox is None:
            order.send(record.task_id)
            order.report(signals.reserved, record, state=State.QUEUED)
            return
        # Kept in the database, it is sent now, or by a sweep when the broker is back.
        with transaction.atomic(using=order.outbox):
            _stage(order, record)
    except BaseException as error:
        _give_back(order, record)
        if not isinstance(error, (OperationalError, DatabaseError, OSError)):
            raise
        logger.warning("idempotency: %s is not queued: %s", record.identity, type(error).__name__)
        raise RequestRefused(
            "not_queued", _UNSURE, retry_after=order.options.retry_after
        ) from error


def _stage(order: Order, record: Record) -> None:
    transaction.on_commit(_AtCommit(order, record), using=order.using)
    if order.outbox is not None:
        order.stage(record.task_id, order.outbox)


class _AtCommit:
    """What a message waits for inside a transaction: sends it after the COMMIT, or gives its key back.

    Django calls this after the COMMIT. It tells nobody of a rollback, but then drops what waits for the commit: so the
    key is given back when this object is gone and was not called. Should the process die before either, the
    reservation's deadline is near, and a repetition publishes.
    """

    def __init__(self, order: Order, record: Record) -> None:
        self._order = order
        self._record = record
        # Not in this thread: its connection is in the middle of the rollback.
        give_back = threading.Thread(target=_give_back, args=(order, record))
        self._rolled_back = weakref.finalize(self, give_back.start)
        self._rolled_back.atexit = False
        # Of a reservation in that very transaction nothing is left to give back.
        if order.store.joined():
            self._rolled_back.detach()

    def __call__(self) -> None:
        self._rolled_back.detach()
        order, record = self._order, self._record
        # From now on it is the message that may be lost, not the transaction.
        try:
            _reserve(order, record.task_id, promised=True)
            promised = True
        except RequestRefused:  # the reservation stands, with less time
            promised = False
        try:
            if order.outbox is None:  # else that sends it
                order.send(record.task_id)
            order.report(signals.reserved, record, state=State.QUEUED)
        except Exception:
            logger.exception("idempotency: %s is committed and not queued", record.identity)
            if not promised or order.message(record.task_id) is None:
                # Who polls finds the key unknown, and sends the request again.
                _give_back(order, record)


def _give_back(order: Order, record: Record) -> None:
    try:
        key_change.give_back(order.store, order.identified, record)
    except (StoreUnavailable, StoreMisconfigured) as trouble:
        logger.warning("idempotency: a reservation is left to its deadline: %s", trouble)


def _status_of(order: Order, record: Record, *, replayed: bool) -> HttpResponse:
    """Return the answer about an operation that did not fail: 200 once it is done, 202 while it is not."""
    described = describe(record, key=order.key, task=order.task, options=order.options)
    status = 200 if described["settled"] else 202
    body = {**described, "url": order.url}
    response = JsonResponse(body, status=status, encoder=DjangoJSONEncoder)
    response["Cache-Control"] = "no-store"
    if order.url:
        response["Location" if status == 202 else "Content-Location"] = order.url
    if status == 202:
        response["Retry-After"] = str(max(round(order.options.retry_after), 1))
    if replayed:
        response[REPLAYED] = "true"
    return response
