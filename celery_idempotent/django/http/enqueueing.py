"""``enqueue`` for views of Django: its requests, its transactions and its outbox."""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from asgiref.sync import sync_to_async
from django.core.serializers.json import DjangoJSONEncoder
from django.db import DEFAULT_DB_ALIAS, DatabaseError, transaction
from django.utils.asyncio import async_unsafe

from celery_idempotent.celery.delivery import copied
from celery_idempotent.django import outbox
from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import caller_scope, http_options, receive
from celery_idempotent.django.http.responses import response_of
from celery_idempotent.django.http.status import status_url
from celery_idempotent.django.transactions import first_on_commit, in_testcase
from celery_idempotent.http.answers import RequestRefused
from celery_idempotent.http.enqueueing import Order
from celery_idempotent.http.requests import find_key, http_identity, read_header, read_key
from celery_idempotent.keys.rules import canonical

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponse

    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyTask
    from celery_idempotent.http.enqueueing import ErrorStatus
    from celery_idempotent.http.options import HttpOptions
    from celery_idempotent.records import Record


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
    options: HttpOptions = getattr(request, "idempotency_options", None) or http_options()
    order = _DjangoOrder(
        cast("IdempotentTask", task),
        args,
        kwargs,
        options=publish_options,
        error_status=error_status or {},
        docs_url=options.docs_url,
    )
    order.request, order.scope, order.using, order.http_options = request, scope, using, options
    return response_of(order.answer())


#: :func:`enqueue` for coroutines: it runs in the thread of the request, so that the event loop is not blocked.
aenqueue: Callable[..., Awaitable[HttpResponse]] = sync_to_async(enqueue)


class _DjangoOrder(Order):
    """The request of a view; ``using`` is the database whose COMMIT the message waits for."""

    encoder = DjangoJSONEncoder
    transient = (*Order.transient, DatabaseError)

    request: HttpRequest
    scope: object
    using: str | None
    http_options: HttpOptions

    def read(self) -> tuple[str, object]:
        plain, options = getattr(self.request, "_request", self.request), self.http_options
        where, required, found = options.key, options.required, None
        if isinstance(where, str):
            found = read_key(read_header(plain.META, where), required=required, name=where)
        receive(plain, options)
        if callable(where):
            given = find_key(where, (self.request,), required=required, name=str(self.task.name))
            # A path has it as a str.
            found = (
                given
                if given is None or isinstance(given, str)
                else canonical(given, task="a request")
            )
        key = found or str(uuid.uuid4())
        scope = self.scope(self.request) if callable(self.scope) else self.scope
        return key, caller_scope(self.request, self.http_options) if scope is None else scope

    def status_url(self) -> str | None:
        """Return the path of the status, ``None`` if the status resource would not find this record for the caller.

        That resource knows the setting ``IDEMPOTENCY_HTTP`` alone; this view may have another scope, its task another
        app.
        """
        identity = self.identity
        try:
            scope = caller_scope(self.request, http_options())
            found = http_identity(identity.namespace, scope, self.key)
        except RequestRefused:
            return None
        is_here = found == identity and celery_app() is self.task.app
        return status_url(identity.namespace, self.key) if is_here else None

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
