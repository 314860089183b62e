"""The HTTP core, which knows no web framework, and ``enqueue`` and ``task_status`` for a route of any.

::

    FastAPI, Starlette    return Response(*enqueue(charge, key=key, scope=user.id, kwargs=order))
    Flask, Quart          return enqueue(charge, key=key, scope=user.id, kwargs=order)
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, NamedTuple, ParamSpec, cast
from urllib.parse import quote

from celery_idempotent.celery.typed import AnyTask
from celery_idempotent.http.answers import Answer
from celery_idempotent.http.enqueueing import ErrorStatus, Order
from celery_idempotent.http.requests import read_key
from celery_idempotent.http.status import status_answer

if TYPE_CHECKING:
    from celery_idempotent.celery.task import IdempotentTask

__all__ = ["ResponseParts", "aenqueue", "atask_status", "enqueue", "task_status"]

P = ParamSpec("P")


class ResponseParts(NamedTuple):
    """A response in the order in which frameworks take its parts."""

    body: bytes
    status: int
    headers: dict[str, str]


def _refuse_loop(name: str) -> None:
    """Refuse a call on an event loop, which would stop meanwhile."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError(f"{name}() would stop the event loop: in a coroutine, `await a{name}(...)`.")


def _in_thread(function: Callable[P, ResponseParts]) -> Callable[P, Awaitable[ResponseParts]]:
    """Return a function for coroutines. The thread goes on when its client hangs up."""

    @wraps(function)
    async def call(*args: P.args, **kwargs: P.kwargs) -> ResponseParts:
        return await asyncio.to_thread(function, *args, **kwargs)

    return call


def _parts(answer: Answer) -> ResponseParts:
    return ResponseParts(answer.body, answer.status, dict(answer.headers))


# -- enqueue -----------------------------------------------------------------------------------------------------------


def enqueue(
    task: AnyTask,
    args: Sequence[object] = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    key: str | None,
    scope: object,
    required: bool = True,
    status_url: str | None = None,
    error_status: ErrorStatus | None = None,
    docs_url: str | None = None,
    **publish_options: object,
) -> ResponseParts:
    """Queue ``task`` for a request, once for each key of a caller, and return the response.

    The message is sent at once, so call it after a COMMIT of your own. In a coroutine, ``await aenqueue(...)``.

    Args:
        task: an ``IdempotentTask``. Its fingerprint of the arguments detects another request with the same key.
        args: for the task.
        kwargs: for the task.
        key: the value of the header ``Idempotency-Key``, ``None`` without one.
        scope: whose key it is, such as the id of a user, with the tenant's where there are tenants; ``None``: 403.
        required: a request without a key is refused; else it runs once more each time.
        status_url: where :func:`task_status` answers: ``"/charges/status?key={key}"``; the key is escaped.
        error_status: HTTP statuses by exception (each in ``idempotency_permanent_errors``): ``{CardDeclined: 402}``.
        docs_url: problems link to it.
        publish_options: options of ``apply_async``.

    Raises:
        InvalidKey: if an argument has no canonical form (``idempotency_fingerprint`` says which of them count).
        InvalidOption: for an option of ``apply_async`` that is set here, ``task_id`` for instance, or a bad
            ``error_status``.
        RuntimeError: in a coroutine.
    """
    _refuse_loop("enqueue")
    order = Order(
        cast("IdempotentTask", task),
        args,
        kwargs or {},
        read=lambda: (read_key(key, required=required) or str(uuid.uuid4()), scope),
        status_url=lambda _, key: status_url and status_url.replace("{key}", quote(key, safe="")),
        options=publish_options,
        error_status=error_status,
        docs_url=docs_url,
    )
    return _parts(order.answer())


aenqueue = _in_thread(enqueue)


# -- status ------------------------------------------------------------------------------------------------------------


def task_status(
    task: AnyTask, key: str, *, scope: object, docs_url: str | None = None
) -> ResponseParts:
    """Return where a task is, as JSON: 200, or 404 for a key that this caller does not have.

    Args:
        task: the ``IdempotentTask`` of :func:`enqueue`.
        key: the key itself, as in ``status_url``; the header may have quotes around it.
        scope: whose key it is, as for :func:`enqueue`.
        docs_url: problems link to it.
    """
    _refuse_loop("task_status")
    definition = cast("IdempotentTask", task).idempotency_definition()
    namespace = str(task.name) if definition is None else definition.identifier.namespace
    return _parts(status_answer(task.app, namespace, key, lambda: scope, docs_url))


atask_status = _in_thread(task_status)
