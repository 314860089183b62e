"""``enqueue``: from a request to a task under one key, with the same answer to each repetition.

::

    POST ─ reserve ─┬─ Reserved ──▶ outbox, or publish after COMMIT ──▶ 202, Location: its status
                    ├─ Held ──────▶ the same 202, or 409
                    ├─ Settled ───▶ 200 with the result │ 500, 504 with the error │ retryable: forgotten, reserved again
                    └─ Mismatched ▶ 422

A 202 holds even if this process dies: :mod:`.reservations` says how.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.serializers.json import DjangoJSONEncoder
from django.db import transaction
from django.http import HttpResponse, JsonResponse

from celery_idempotent import backoff, signals
from celery_idempotent.django.http import reservations
from celery_idempotent.django.http.describing import describe, failure_of
from celery_idempotent.django.http.messages import REPLAYED
from celery_idempotent.django.http.options import HttpOptions, http_options
from celery_idempotent.django.http.orders import TaskOrder, read_order
from celery_idempotent.django.http.problems import RequestRefused, problem
from celery_idempotent.django.testcases import in_testcase
from celery_idempotent.records import Held, Mismatched, Record, Reserved, Settled, State

if TYPE_CHECKING:
    from django.http import HttpRequest

    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyTask, Options


def enqueue(
    request: HttpRequest,
    task: AnyTask,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    scope: object = None,
    using: str | None = None,
    **publish: object,
) -> HttpResponse:
    """Let ``task`` do the work of ``request``, once for each ``Idempotency-Key``, and return the answer.

    Args:
        request: the request; its ``Idempotency-Key`` is the task's key.
        task: an ``IdempotentTask``. Its fingerprint of the arguments detects another request with the same key.
        args: for the task.
        kwargs: for the task.
        scope: whose key it is: a value, or a function of the request; by default the caller.
        using: the database whose COMMIT the message waits for, inside a transaction; ``"default"`` if not given.
        publish: options of ``apply_async``.

    Raises:
        InvalidKey: if an argument has no canonical form (``idempotency_fingerprint`` says which of them count).
        InvalidOption: for an option of ``apply_async`` that is set here, ``task_id`` for instance.
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
            return _send_unguarded(task, args, kwargs or {}, publish)
        in_transaction = transaction.get_connection(using).in_atomic_block
        found = _reserve_or_find(order, in_transaction=in_transaction)
        return _answer(order, found, in_transaction=in_transaction)
    except RequestRefused as refusal:
        return refusal.response(options.docs_url)


def _send_unguarded(
    task: AnyTask, args: Sequence[object], kwargs: Mapping[str, object], publish: Options
) -> HttpResponse:
    """Publish for a task that is switched off: each request sends one more message."""
    cast("IdempotentTask", task).apply_async(args, kwargs, **publish)
    return JsonResponse({"state": State.QUEUED.value}, status=202)


#: :func:`enqueue` for coroutines: it runs in the thread of the request, so that the event loop is not blocked.
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


def _reserve_or_find(order: TaskOrder, *, in_transaction: bool) -> Reserved | Held | Settled:
    """Reserve the key, or find the first request's record.

    The store is asked again while its answer may still change: the first request has not committed its reservation yet,
    or it failed and may be tried again: then its record is deleted first. ``in_transaction``: this request has a
    transaction open.

    Raises:
        RequestRefused: if the key was used with other content, the store does not answer, or the first request does
            not commit in time.
    """
    task_id = str(uuid.uuid4())
    give_up, attempts = time.monotonic() + reservations.REQUEST_RETRY_SECONDS, 0
    while True:
        # An outbox has the message only when the transaction commits in which that is staged.
        uncommitted = in_transaction or order.outbox is not None
        match reservations.reserve_key(order, task_id, uncommitted=uncommitted):
            case Reserved(record) if record.task_id != task_id:
                # The process that reserved it died. Its message may exist: reserve again, under the same task id.
                task_id = record.task_id
            case Held(record, _) if _waits_for_commit(order, record):
                attempts += 1
                if not backoff.pause(attempts, until=give_up, first=0.02):
                    raise _in_progress_refusal(
                        order, record, "It is not queued yet. Ask again later."
                    )
            case Settled(record, _) if _is_retryable(order, record):
                # Deletes this failure only: if another request has reserved the key meanwhile, the next round finds
                # that reservation.
                reservations.forget_failure(order, record)
            case Mismatched(record):
                order.report(signals.mismatched, record)
                raise RequestRefused(
                    "idempotency_key_reused",
                    "It was sent before with other content. A key stands for one intention: use a new one.",
                )
            case found:
                return found


def _answer(
    order: TaskOrder, found: Reserved | Held | Settled, *, in_transaction: bool
) -> HttpResponse:
    """Send the message if this request reserved the key, or answer from the record of the first request."""
    match found:
        case Reserved(record):
            reservations.queue_message(order, record, in_transaction=in_transaction)
            return _status_response(order, record, replayed=False)
        case Held(record, _) if order.options.on_pending == "refuse":
            raise _in_progress_refusal(order, record, "Ask its status resource, or again later.")
        case Settled(record, _) if record.state.raises:
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
        case Held(record, _) | Settled(record, _):
            order.report(signals.replayed, record)
            return _status_response(order, record, replayed=True)


def _waits_for_commit(order: TaskOrder, record: Record) -> bool:
    """Does this request wait until the first one has committed its reservation? Not in a TestCase: it never commits."""
    return (
        order.options.on_pending == "accept"
        and record.uncommitted
        and not in_testcase(transaction.get_connection(order.using))
    )


def _is_retryable(order: TaskOrder, record: Record) -> bool:
    """Did the first request fail, and not for good? Then this one tries again."""
    return record.state.raises and failure_of(record, order.task, order.options).retryable


def _in_progress_refusal(order: TaskOrder, record: Record, advice: str) -> RequestRefused:
    """Report the conflict, and return what answers the request."""
    order.report(signals.conflicted, record)
    return RequestRefused(
        "request_in_progress",
        f"The first request with this key is still being worked on. {advice}",
        retry_after=order.options.retry_after,
    )


def _status_response(order: TaskOrder, record: Record, *, replayed: bool) -> HttpResponse:
    """Return the answer about an operation that has not failed: 200 once it is done, 202 while it is not."""
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
