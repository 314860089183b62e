"""``enqueue``: from a request to a task under one key, with an answer that is the same however often it is asked for.

::

    POST ─ reserve ─┬─ Reserved ──▶ outbox, or publish after COMMIT ──▶ 202, Location: its status
                    ├─ Held ──────▶ the same 202, or 409
                    ├─ Settled ───▶ 200 with the result │ 500, 504 with the error │ retryable: forgotten, reserved anew
                    └─ Mismatched ▶ 422

A 202 is a promise, and outlives the process that gives it: whoever reserves leaves the message with the record, or in
the outbox, and a sweep sends it should nobody else do so. A reservation of a transaction that may still be rolled back
promises nothing, and its deadline is near.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DatabaseError, transaction
from django.http import HttpResponse, JsonResponse
from kombu.exceptions import OperationalError

from celery_idempotent.celery.reserving import RESERVED_MS
from celery_idempotent.django.http.describing import describe, failure_of
from celery_idempotent.django.http.messages import REPLAYED
from celery_idempotent.django.http.options import HttpOptions, http_options
from celery_idempotent.django.http.orders import Order, read_order
from celery_idempotent.django.http.problems import Refusal, problem
from celery_idempotent.django.http.status import status_url
from celery_idempotent.django.testcases import in_testcase
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol import backoff, key_change
from celery_idempotent.records import Held, Mismatched, Record, Reserved, Settled, State

__all__ = ["aenqueue", "enqueue"]

logger = logging.getLogger(__name__)

#: A reservation inside a transaction, which may be rolled back without a word: how long it keeps others from theirs.
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
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
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
        return _answer(order)
    except Refusal as refusal:
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


def _answer(order: Order) -> HttpResponse:
    within = transaction.get_connection(order.using).in_atomic_block
    task_id = str(uuid.uuid4())
    give_up, looks = time.monotonic() + PATIENCE, 0
    while True:
        match _reserve(order, task_id, promised=not within and order.outbox is None):
            case Reserved(record) if record.task_id != task_id:
                # Its sender is lost, and our message is to be under its id, too.
                task_id = record.task_id
            case Reserved(record):
                _queue(order, record, within=within)
                return _pending(order, record, replayed=False)
            case Held(record, _):
                if order.options.on_pending == "refuse":
                    raise _in_progress(order, "Ask its status resource, or again later.")
                if not _uncommitted(record) or in_testcase(transaction.get_connection(order.using)):
                    return _pending(order, record, replayed=True)
                looks += 1
                if not backoff.pause(looks, until=give_up, first=0.02):
                    raise _in_progress(order, "It is not queued yet. Ask again later.")
            case Settled(record, _):
                answer = _settled(order, record)
                if answer is not None:
                    return answer
                # Only this very failure: whoever comes second finds the first one's reservation.
                _patiently(order, partial(_forget, order, record))
            case Mismatched():
                raise Refusal(
                    "idempotency_key_reused",
                    "It was sent before with other content. A key stands for one intention: use a new one.",
                )


def _in_progress(order: Order, advice: str) -> Refusal:
    return Refusal(
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


def _reserve(order: Order, task_id: str, *, promised: bool) -> Any:
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


def _patiently(order: Order, verb: Callable[[], Any]) -> Any:
    """Ask the store, again and again for a while: each verb may be repeated."""
    try:
        return backoff.persist(verb, until=time.monotonic() + PATIENCE)
    except (StoreUnavailable, StoreMisconfigured) as error:
        logger.warning("idempotency: a request is not queued: %s", error)
        raise Refusal(
            "store_unavailable",
            _UNSURE,
            retry_after=order.options.retry_after,
        ) from error


def _queue(order: Order, record: Record, *, within: bool) -> None:
    """Send the message, now or after the COMMIT."""
    if within:
        _stage(order, record)
        return
    try:
        if order.outbox is None:
            order.send(record.task_id)
            return
        # Kept in the database, it is sent now, or by a sweep when the broker is back.
        with transaction.atomic(using=order.outbox):
            _stage(order, record)
    except BaseException as error:
        _give_back(order, record)
        if not isinstance(error, (OperationalError, DatabaseError, OSError)):
            raise
        logger.warning("idempotency: %s is not queued: %s", record.identity, type(error).__name__)
        raise Refusal("not_queued", _UNSURE, retry_after=order.options.retry_after) from error


def _stage(order: Order, record: Record) -> None:
    transaction.on_commit(_Promise(order, record), using=order.using)
    if order.outbox is not None:
        order.stage(record.task_id, order.outbox)


class _Promise:
    """A message that waits for a COMMIT, and gives its key back should there be none.

    Django tells nobody of a rollback, but then drops what waits for the commit. Should the process die before either,
    the reservation's deadline is near, and a repetition publishes.
    """

    def __init__(self, order: Order, record: Record) -> None:
        self._order = order
        self._record = record
        # Of a reservation in that very transaction nothing is left to give back.
        self._kept = order.store.joined()

    def __call__(self) -> None:
        self._kept = True
        order, record = self._order, self._record
        # From now on it is the message that may be lost, not the transaction.
        try:
            _reserve(order, record.task_id, promised=True)
            promised = True
        except Refusal:  # the reservation stands, with less time
            promised = False
        if order.outbox is not None:
            return  # the outbox sends it
        try:
            order.send(record.task_id)
        except Exception:
            logger.exception("idempotency: %s is committed and not queued", record.identity)
            if not promised or order.message(record.task_id) is None:
                # Who polls finds the key unknown, and sends the request again.
                _give_back(order, record)

    def __del__(self) -> None:
        if not self._kept:
            # Not in this thread: its connection is in the middle of the rollback.
            threading.Thread(target=_give_back, args=(self._order, self._record)).start()


def _give_back(order: Order, record: Record) -> None:
    try:
        key_change.give_back(order.store, order.identified, record)
    except (StoreUnavailable, StoreMisconfigured) as trouble:
        logger.warning("idempotency: a reservation is left to its deadline: %s", trouble)


def _pending(order: Order, record: Record, *, replayed: bool) -> HttpResponse:
    told = describe(record, key=order.key, task=order.task, options=order.options)
    return _respond(order, told, 202, replayed=replayed)


def _settled(order: Order, record: Record) -> HttpResponse | None:
    """Return the stored end, ``None`` if it is a failure that may be tried again."""
    told = describe(record, key=order.key, task=order.task, options=order.options)
    if record.state is State.COMPLETED:
        return _respond(order, told, 200 if told["settled"] else 202, replayed=True)
    failure = failure_of(record, order.task, order.options)
    if failure.retryable:
        return None
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


def _respond(order: Order, told: dict[str, Any], status: int, *, replayed: bool) -> HttpResponse:
    url = status_url(order.identified.identity.namespace, order.key) if order.shown else None
    response = JsonResponse({**told, "url": url}, status=status, encoder=DjangoJSONEncoder)
    response["Cache-Control"] = "no-store"
    if url:
        response["Location" if status == 202 else "Content-Location"] = url
    if status == 202:
        response["Retry-After"] = str(max(round(order.options.retry_after), 1))
    if replayed:
        response[REPLAYED] = "true"
    return response
