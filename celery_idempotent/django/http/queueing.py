"""``enqueue``: from a request to a task under one key, with an answer that is the same however often it is asked for.

::

    POST ─ reserve ─┬─ Reserved ──▶ outbox, or publish after COMMIT ──▶ 202, Location: its status
                    ├─ Held ──────▶ the same 202, or 409
                    ├─ Settled ───▶ 200 with the result │ 500, 504 with the error │ retryable: forgotten, reserved anew
                    └─ Mismatched ▶ 422
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from django.core.serializers.json import DjangoJSONEncoder
from django.db import DEFAULT_DB_ALIAS, DatabaseError, transaction
from django.http import HttpResponse, JsonResponse
from kombu.exceptions import OperationalError

from celery_idempotent.django.http.decorators import require_key
from celery_idempotent.django.http.describing import describe, failure_of
from celery_idempotent.django.http.guards import http_identity
from celery_idempotent.django.http.messages import REPLAYED
from celery_idempotent.django.http.options import HttpOptions, read_options
from celery_idempotent.django.http.problems import Refusal, problem
from celery_idempotent.django.http.scopes import caller_scope
from celery_idempotent.django.http.status import status_url
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.hooks import KEEP_FAILURE_HEADER
from celery_idempotent.keys import Identified
from celery_idempotent.publishing import RESERVED_MS
from celery_idempotent.records import Held, Mismatched, Record, Reserved, Settled, State
from celery_idempotent.stores import Store, get_store

if TYPE_CHECKING:
    from celery_idempotent.task import IdempotentTask

__all__ = ["enqueue"]

logger = logging.getLogger(__name__)

#: A reservation inside a transaction, which may be rolled back without a word: how long it keeps others from theirs.
UNCOMMITTED_MS = 10_000

#: How long the store is given to answer, in seconds.
PATIENCE = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Order:
    """What is to be done, and how to say so."""

    task: IdempotentTask
    key: str
    scope: object
    identified: Identified
    options: HttpOptions
    keep_ms: int
    send: Callable[[str], Any]
    stage: Callable[[str, str], Any]
    using: str | None

    @property
    def store(self) -> Store:
        return get_store(self.task.app)

    @property
    def outbox(self) -> str | None:
        """The database whose outbox takes the message: the store's, if that is also the one of the transaction."""
        alias: str | None = getattr(self.store, "outbox_alias", None)
        ours = alias == (self.using or DEFAULT_DB_ALIAS)
        return alias if ours and not self.task.app.conf.task_always_eager else None


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
    """
    options: HttpOptions = getattr(request, "idempotency_options", None) or read_options()
    try:
        order = _order(request, task, args, kwargs or {}, scope, using, publish, options)
        return _answer(order) if isinstance(order, _Order) else order
    except Refusal as refusal:
        return refusal.response(options.docs_url)


def _order(
    request: Any,
    task: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    scope: object,
    using: str | None,
    publish: dict[str, Any],
    options: HttpOptions,
) -> _Order | HttpResponse:
    plain = getattr(request, "_request", request)
    key = require_key(plain, options) or str(uuid.uuid4())
    if callable(scope):
        scope = scope(request)
    if scope is None:
        scope = caller_scope(request, options)
    definition = task.idempotency_definition()
    if definition is None:  # switched off
        task.apply_async(args, kwargs, **publish)
        return JsonResponse({"state": State.QUEUED.value}, status=202)
    http_identity(definition.identifier.namespace, scope, key)  # refuses what cannot be a key
    publish |= {
        "headers": {**(publish.get("headers") or {}), KEEP_FAILURE_HEADER: True},
        "idempotency_key": key,
        "idempotency_scope": scope,
    }
    identified = definition.identifier.identify(args, kwargs, task_id="", key=key, scope=scope)
    return _Order(
        task=task,
        key=key,
        scope=scope,
        identified=identified,
        options=options,
        keep_ms=definition.policy.keep_ms,
        send=lambda task_id: task.apply_async(args, kwargs, **publish, task_id=task_id),
        stage=lambda task_id, alias: _stage(
            task, args, kwargs, {**publish, "task_id": task_id}, alias
        ),
        using=using,
    )


def _stage(
    task: IdempotentTask,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    publish: dict[str, Any],
    alias: str,
) -> None:
    # Imported late: its tables are there only where the app is installed.
    from celery_idempotent.django import outbox

    outbox.stage(task, args, kwargs, publish, using=alias)


def _answer(order: _Order) -> HttpResponse:
    within = transaction.get_connection(order.using).in_atomic_block
    task_id = str(uuid.uuid4())
    while True:
        match _reserve(order, task_id, UNCOMMITTED_MS if within else RESERVED_MS):
            case Reserved(record):
                if within:
                    transaction.on_commit(_Promise(order, record), using=order.using)
                    if order.outbox is not None:
                        order.stage(record.task_id, order.outbox)
                else:
                    _publish(order, record)
                return _pending(order, record, replayed=False)
            case Held(record, _):
                if order.options.on_pending == "refuse":
                    raise Refusal(
                        "request_in_progress",
                        "The first request with this key is still being worked on. Ask its status resource, or again "
                        "later.",
                        retry_after=order.options.retry_after,
                    )
                return _pending(order, record, replayed=True)
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


def _reserve(order: _Order, task_id: str, deadline_ms: int) -> Any:
    return _patiently(
        order,
        lambda: order.store.reserve(
            order.identified.identity,
            task_id=task_id,
            deadline_ms=deadline_ms,
            keep_ms=order.keep_ms,
            fingerprint=order.identified.fingerprint,
        ),
    )


def _forget(order: _Order, record: Record) -> bool:
    return order.store.forget(record.identity, token=record.token)


def _patiently(order: _Order, verb: Callable[[], Any]) -> Any:
    """Ask the store, again and again for a while: each verb may be repeated."""
    give_up, delay = time.monotonic() + PATIENCE, 0.05
    while True:
        try:
            return verb()
        except (StoreUnavailable, StoreMisconfigured) as error:
            if isinstance(error, StoreMisconfigured) or time.monotonic() + delay > give_up:
                logger.warning("idempotency: a request is not queued: %s", error)
                raise Refusal(
                    "store_unavailable",
                    "Nothing was done. Send the same request with the same key again.",
                    retry_after=order.options.retry_after,
                ) from error
        time.sleep(delay)
        delay *= 2


def _publish(order: _Order, record: Record) -> None:
    try:
        if order.outbox is None:
            order.send(record.task_id)
            return
        # Kept in the database, it is sent now, or by a sweep when the broker is back.
        with transaction.atomic(using=order.outbox):
            order.stage(record.task_id, order.outbox)
    except BaseException as error:
        _give_back(order, record)
        if not isinstance(error, (OperationalError, DatabaseError, OSError)):
            raise
        logger.warning("idempotency: %s is not queued: %s", record.identity, type(error).__name__)
        raise Refusal(
            "not_queued",
            "Nothing was done. Send the same request with the same key again.",
            retry_after=order.options.retry_after,
        ) from error


class _Promise:
    """A message that waits for a COMMIT, and gives its key back should there be none.

    Django tells nobody of a rollback, but then drops what waits for the commit. Should the process die before either,
    the reservation's deadline is near, and a repetition publishes.
    """

    def __init__(self, order: _Order, record: Record) -> None:
        self._order = order
        self._record = record
        self._kept = False

    def __call__(self) -> None:
        self._kept = True
        order, record = self._order, self._record
        # From now on it is the message that may be lost, not the transaction.
        with suppress(Refusal):  # the reservation stands, with less time
            _reserve(order, record.task_id, RESERVED_MS)
        if order.outbox is not None:
            return  # the outbox sends it
        try:
            order.send(record.task_id)
        except Exception:
            # Who polls finds the key unknown, and sends the request again.
            logger.exception("idempotency: %s is committed and not queued", record.identity)
            _give_back(order, record)

    def __del__(self) -> None:
        if not self._kept:
            # Not in this thread: its connection is in the middle of the rollback.
            threading.Thread(target=_give_back, args=(self._order, self._record)).start()


def _give_back(order: _Order, record: Record) -> None:
    try:
        order.store.release(record.identity, token=record.token)
    except (StoreUnavailable, StoreMisconfigured) as trouble:
        logger.warning("idempotency: a reservation is left to its deadline: %s", trouble)


def _pending(order: _Order, record: Record, *, replayed: bool) -> HttpResponse:
    told = describe(record, key=order.key, task=order.task, options=order.options)
    return _respond(order, told, 202, replayed=replayed)


def _settled(order: _Order, record: Record) -> HttpResponse | None:
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


def _respond(order: _Order, told: dict[str, Any], status: int, *, replayed: bool) -> HttpResponse:
    url = status_url(order.identified.identity.namespace, order.key)
    response = JsonResponse({**told, "url": url}, status=status, encoder=DjangoJSONEncoder)
    response["Cache-Control"] = "no-store"
    if url:
        response["Location" if status == 202 else "Content-Location"] = url
    if status == 202:
        response["Retry-After"] = str(max(round(order.options.retry_after), 1))
    if replayed:
        response[REPLAYED] = "true"
    return response
