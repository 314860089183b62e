"""``enqueue``: from a request to a task under one key, with the same answer to each repetition.

::

    POST ─ reserve ─┬─ Reserved ──▶ outbox, or publish after COMMIT ──▶ 202, Location: its status
                    ├─ Held ──────▶ the same 202; 409 while the first request is not committed
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
from functools import partial
from typing import TYPE_CHECKING, cast

from asgiref.sync import sync_to_async
from django.core.exceptions import SynchronousOnlyOperation
from django.core.serializers.json import DjangoJSONEncoder
from django.db import transaction
from django.http import HttpResponse, JsonResponse

from celery_idempotent import backoff, signals
from celery_idempotent.celery.delivery import copied
from celery_idempotent.django.http import reservations
from celery_idempotent.django.http.messages import problem, refusal
from celery_idempotent.django.http.options import HttpOptions, http_options
from celery_idempotent.django.http.orders import ErrorStatus, QueuedRequest, read_request
from celery_idempotent.django.testcases import in_testcase
from celery_idempotent.http.describing import describe, failure_of
from celery_idempotent.http.problems import RETRY_AFTER, RequestRefused
from celery_idempotent.http.responses import REPLAYED
from celery_idempotent.records import Held, Mismatched, Record, Reserved, Settled, State

if TYPE_CHECKING:
    from django.http import HttpRequest

    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyTask


def enqueue(
    request: HttpRequest,
    task: AnyTask,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    scope: object = None,
    using: str | None = None,
    error_status: ErrorStatus | None = None,
    **publish_options: object,
) -> HttpResponse:
    """Let ``task`` do the work of ``request``, once for each ``Idempotency-Key``, and return the answer.

    Args:
        request: the request; its ``Idempotency-Key`` is the task's key.
        task: an ``IdempotentTask``. Its fingerprint of the arguments detects another request with the same key.
        args: for the task.
        kwargs: for the task.
        scope: whose key it is: a value, or a function of the request; by default the caller.
        using: the database whose COMMIT the message waits for, inside a transaction; ``"default"`` if not given.
        error_status: HTTP statuses by exception (each in ``idempotency_permanent_errors``): ``{CardDeclined: 402}``.
        publish_options: options of ``apply_async``.

    Raises:
        InvalidKey: if an argument has no canonical form (``idempotency_fingerprint`` says which of them count).
        InvalidOption: for an option of ``apply_async`` that is set here, ``task_id`` for instance, or a bad
            ``error_status``.
        SynchronousOnlyOperation: in a coroutine, which has :func:`aenqueue`.
    """
    _refuse_event_loop()
    options: HttpOptions = getattr(request, "idempotency_options", None) or http_options()
    try:
        in_transaction = transaction.get_connection(using).in_atomic_block
        kwargs = kwargs or {}
        queued = read_request(
            request,
            task,
            args,
            kwargs,
            scope=scope,
            using=using,
            error_status=error_status or {},
            publish_options=publish_options,
            options=options,
        )
        if not isinstance(queued, QueuedRequest):
            if in_transaction:
                args, kwargs = copied(args, kwargs) or (args, kwargs)
            send = partial(cast("IdempotentTask", task).apply_async, args, kwargs, **queued)
            return _send_unguarded(send, using=using, in_transaction=in_transaction)
        found = _reserve_or_find(queued, in_transaction=in_transaction)
        return _answer(queued, found, in_transaction=in_transaction)
    except RequestRefused as refused:
        return refusal(refused, options)


def _send_unguarded(
    send: Callable[[], object], *, using: str | None, in_transaction: bool
) -> HttpResponse:
    """Publish for a task that is switched off, or observed by its worker: each request sends one more message."""
    if in_transaction:
        transaction.on_commit(send, using=using)
    else:
        send()
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


def _reserve_or_find(queued: QueuedRequest, *, in_transaction: bool) -> Reserved | Held | Settled:
    """Reserve the key, or find the first request's record. ``in_transaction``: this request has a transaction open.

    The store is asked again in three cases:

    - An earlier reservation is past its deadline: it is made anew, under the same task id.
    - The first request has not committed its reservation yet: this one waits for that.
    - The first request failed, and may be tried again: its record is deleted.

    Raises:
        RequestRefused: if the key was used with other content, the store does not answer, or the first request does
            not commit in time.
    """
    task_id = str(uuid.uuid4())
    give_up, attempts = time.monotonic() + reservations.REQUEST_RETRY_SECONDS, 0
    while True:
        # The message is sure to be sent only after a COMMIT: of this transaction, or of the one that stages it.
        uncommitted = in_transaction or queued.outbox_alias is not None
        match reservations.reserve_key(queued, task_id, uncommitted=uncommitted):
            case Reserved(record) if record.task_id != task_id:
                # That reservation is past its deadline: its process died, or its message waits in a long queue. So a
                # second message must have the same task id: reserve the key again, under that.
                task_id = record.task_id
            case Held(record, _) if _waits_for_commit(queued, record):
                attempts += 1
                if not backoff.pause(attempts, until=give_up, first=0.02):
                    queued.report(signals.conflicted, record)
                    raise RequestRefused(
                        "request_in_progress",
                        "The first request with this key is not committed yet. Ask again later.",
                    )
            case Settled(record, _) if _is_retryable(queued, record):
                # Deletes this failure only: if another request has reserved the key meanwhile, the next round finds
                # that reservation.
                reservations.forget_failure(queued, record)
            case Mismatched(record):
                queued.report(signals.mismatched, record)
                raise RequestRefused(
                    "idempotency_key_reused",
                    "It was sent before with other content. A key stands for one intention: use a new one.",
                )
            case found:
                return found


def _answer(
    queued: QueuedRequest, found: Reserved | Held | Settled, *, in_transaction: bool
) -> HttpResponse:
    """Send the message if this request reserved the key, or answer from the record of the first request."""
    match found:
        case Reserved(record):
            reservations.queue_message(queued, record, in_transaction=in_transaction)
            return _status_response(queued, record, replayed=False)
        case Settled(record, _) if record.state.is_failure:
            queued.report(signals.replayed, record)
            failure = failure_of(record, queued.task)
            answer = problem(
                failure.code,
                failure.detail,
                status=_status_of(failure.kind, queued.error_status),
                retryable=False,
                docs_url=queued.options.docs_url,
                state=record.state.value,
                error=failure.error,
            )
            answer[REPLAYED] = "true"
            return answer
        case Held(record, _) | Settled(record, _):
            queued.report(signals.replayed, record)
            return _status_response(queued, record, replayed=True)


def _status_of(kind: type[BaseException] | None, error_status: ErrorStatus) -> int | None:
    """Return the status that the view gives this failure; ``None``: the usual one."""
    return next(
        (error_status[each] for each in getattr(kind, "__mro__", ()) if each in error_status), None
    )


def _waits_for_commit(queued: QueuedRequest, record: Record) -> bool:
    """Does this request wait until the first one has committed its reservation? Not in a TestCase: it never commits."""
    return record.uncommitted and not in_testcase(transaction.get_connection(queued.using))


def _is_retryable(queued: QueuedRequest, record: Record) -> bool:
    """Did the first request fail, and not for good? Then this one tries again."""
    return record.state.is_failure and failure_of(record, queued.task).retryable


def _status_response(queued: QueuedRequest, record: Record, *, replayed: bool) -> HttpResponse:
    """Return the answer about an operation that has not failed: 200 once it is done, 202 while it is not."""
    described = describe(record, key=queued.key, task=queued.task, encoder=DjangoJSONEncoder)
    status = 200 if described["settled"] else 202
    body = {**described, "url": queued.url}
    response = JsonResponse(body, status=status, encoder=DjangoJSONEncoder)
    response["Cache-Control"] = "no-store"
    if queued.url:
        response["Location" if status == 202 else "Content-Location"] = queued.url
    if status == 202:
        response["Retry-After"] = str(RETRY_AFTER)
    if replayed:
        response[REPLAYED] = "true"
    return response
