"""``enqueue`` for views of Django: its requests, its transactions and its outbox."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.db import DEFAULT_DB_ALIAS, DatabaseError, transaction
from django.utils.asyncio import async_unsafe

from celery_idempotent.celery.delivery import copied
from celery_idempotent.django import outbox
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import DjangoExchange, caller_scope, http_options
from celery_idempotent.django.http.responses import response_of, status_url
from celery_idempotent.django.transactions import first_on_commit, in_testcase
from celery_idempotent.http.answers import RequestRefused
from celery_idempotent.http.enqueueing import Order
from celery_idempotent.http.guard import Guard
from celery_idempotent.http.requests import http_identity
from celery_idempotent.keys.rules import canonical
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.http.enqueueing import ErrorStatus
    from celery_idempotent.http.guard import HttpOptions
    from celery_idempotent.records import Identity, Record


@async_unsafe(
    "enqueue() waits for the store and the broker, which would block the event loop: in a coroutine, use "
    "`await aenqueue(...)`."
)
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
    """Queue ``task`` for ``request``, once for each ``Idempotency-Key``, and return the response.

    The other arguments, ``InvalidKey`` and ``InvalidOption`` are as for :func:`celery_idempotent.http.enqueue`.

    Args:
        request: the request; its ``Idempotency-Key`` is the task's key.
        scope: whose key it is: a value, or a function of the request; by default the caller.
        using: the database whose COMMIT the message waits for, inside a transaction; ``"default"`` if not given.

    Raises:
        SynchronousOnlyOperation: in a coroutine, which has :func:`aenqueue`.
    """
    kwargs = kwargs or {}
    if transaction.get_connection(using).in_atomic_block:
        # The view may change them before the COMMIT.
        args, kwargs = copied(args, kwargs)
    plain = getattr(request, "_request", request)
    http: HttpOptions = getattr(plain, "idempotency_options", None) or http_options()
    name = str(task.name)

    def read() -> tuple[str, object]:
        asked = DjangoExchange(Guard(name, task, http, partial(get_store, task.app)), request)
        asked.take_key()
        # A path has it as a str.
        key = (
            asked.raw_key
            if isinstance(asked.raw_key, str | None)
            else canonical(asked.raw_key, task=name)
        )
        whose = scope(request) if callable(scope) else scope
        return key or str(uuid.uuid4()), asked.caller() if whose is None else whose

    order = _DjangoOrder(
        cast("IdempotentTask", task),
        args,
        kwargs,
        read=read,
        status_url=partial(_status_url, request, task),
        options=publish_options,
        error_status=error_status,
        docs_url=http.docs_url,
    )
    order.using = using
    return response_of(order.answer())


#: :func:`enqueue` for coroutines: it runs in the thread of the request, so that the event loop is not blocked.
aenqueue: Callable[..., Awaitable[HttpResponse]] = sync_to_async(enqueue)


def _status_url(request: HttpRequest, task: AnyTask, identity: Identity, key: str) -> str | None:
    """Return the path of the status, ``None`` if the status resource would not find this record for the caller.

    That resource knows the setting ``IDEMPOTENCY_HTTP`` alone; this view may have another scope, its task another
    app.
    """
    try:
        scope = caller_scope(request, http_options())
        found = http_identity(identity.namespace, scope, key)
    except RequestRefused:
        return None
    is_here = found == identity and celery_app() is task.app
    return status_url(identity.namespace, key) if is_here else None


class _DjangoOrder(Order):
    """The request of a view; ``using`` is the database whose COMMIT the message waits for."""

    transient = (*Order.transient, DatabaseError)
    using: str | None

    @property
    def _connection(self) -> Any:
        return transaction.get_connection(self.using)

    @property
    def in_transaction(self) -> bool:  # type: ignore[override]
        return bool(self._connection.in_atomic_block)

    @property
    def has_outbox(self) -> bool:  # type: ignore[override]
        """The records are in the database whose COMMIT the message waits for: its outbox takes the message."""
        alias = self.using or DEFAULT_DB_ALIAS
        return self.store.outbox_alias == alias and not self.task.app.conf.task_always_eager

    def on_commit(self, function: Callable[[], object]) -> None:
        transaction.on_commit(function, using=self.using)  # at once without a transaction

    def joins_first(self) -> bool:
        """Are both in the transaction of a ``TestCase``?"""
        return in_testcase(self._connection)

    def queue_or_defer(self, record: Record) -> None:
        alias = self.store.outbox_alias if self.has_outbox else None
        own = None if self.in_transaction else alias
        with nullcontext() if own is None else transaction.atomic(using=own):
            if alias is not None:
                # The outbox has it from the COMMIT on: it is sent then, or by a sweep once the broker is back.
                options = {**self.options, "task_id": record.task_id}
                outbox.stage(self.task, self.args, self.kwargs, options, using=alias)
            if self.in_transaction or alias is not None:
                first_on_commit(self._connection, partial(self.committed, record))
            else:
                self.send(record)
