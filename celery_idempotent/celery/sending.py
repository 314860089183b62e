"""Sending what a finished task sends (links, the next step of a chain, its part of a chord), before Celery would.

Celery sends these after the run. If that fails, Celery counts it as a failure of the task: the body took effect, the
record says COMPLETED, but the task's state is FAILURE and its callbacks are never sent. So they are sent here, by the
same calls in the same order. At this point the message can still be made to come back. Celery then finds nothing left
to send::

    run ─ settle ─┬─ links ─ chain ─ result ─ chord part ─ mark ─ SUCCESS (hooks, signals) ─ ack
                  └─ ✗ ─┬─ published again with a countdown, without what was sent ─ ack
                        └─ ✗ the broker is away ─ tried again, here, until it is back
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from billiard.einfo import ExceptionInfo
from celery.canvas import group, maybe_signature
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.serialization import get_pickleable_exception

from celery_idempotent.celery import delivery, republish, storing
from celery_idempotent.celery.chords import Undelivered, is_permanent, retryable
from celery_idempotent.celery.delivery import Due
from celery_idempotent.celery.typed import Sig
from celery_idempotent.identity.trees import AnySignature, canvas_tasks

if TYPE_CHECKING:
    from celery.app.task import Context

    from celery_idempotent.celery.task import IdempotentTask
    from celery_idempotent.celery.typed import AnyRequest

logger = logging.getLogger(__name__)

#: The ids of what this delivery has published so far.
_published: ContextVar[set[str] | None] = ContextVar("idempotency_published", default=None)


def send_after(task: IdempotentTask, request: Context, run: Callable[[], object]) -> object:
    """Run, or answer from the record; then send what the request has to send, if a record says that this is due.

    Raises:
        Ignore: if that cannot be sent now: the message comes back.
        Exception: what the run raised; or what makes sending impossible: then the task fails, and its record stays.
    """
    delivery.take_due(request)  # some pools keep one request for all deliveries of a task
    policy = task.idempotency_policy
    replaced = None
    try:
        value = run()
    except delivery.Replaced as error:
        # Not to be the context of what is raised below: it holds what cannot be pickled.
        replaced = error
    except Exception as error:
        due = delivery.take_due(request)
        if due is not None and not isinstance(error, (Ignore, Reject, Retry)):
            left_ms = policy.settled_keep_ms // 2 - due.age_ms
            _deliver(task, request, due, left_ms, partial(_send_failure, task, request, error))
            if not _celery_sends_it(request):
                request.errbacks = request.chain = request.chord = None
        raise
    if replaced is not None:
        left_ms = policy.settled_keep_ms // 2 - replaced.due.age_ms
        trouble = _deliver(task, request, replaced.due, left_ms, replaced.signature.delay)
        if trouble is not None:
            replaced.free()  # as where it is raised within run()
            raise trouble
        raise Ignore(str(replaced))
    due = delivery.take_due(request)
    if due is not None:
        left_ms = policy.settled_keep_ms // 2 - due.age_ms
        send = partial(_send_success, task, request, value)
        trouble = _deliver(task, request, due, left_ms, send)
        if trouble is not None:
            raise trouble
        if not _celery_sends_it(request):
            request.callbacks = request.chain = request.chord = None
            request.ignore_result = True  # it is stored
    return value


def _deliver(
    task: IdempotentTask, request: Context, due: Due, left_ms: int, send: Callable[[], object]
) -> BaseException | None:
    """Send, then mark the record as delivered. If that fails, have the message come back.

    Returns the error of callbacks that cannot be sent, however often the message comes back. ``left_ms``: for so long
    its record will surely be there to answer the message. After that a redelivery would run the body again, so the
    callbacks are given up.
    """
    if _celery_sends_it(request):
        due.mark()
        return None
    token = _published.set(set())
    try:
        send()
    except (Exception, Undelivered) as error:  # noqa: BLE001  brokers and backends fail in their own ways
        trouble = error.trouble if isinstance(error, Undelivered) else error
        _forget_published(request)
    else:
        due.mark()
        return None
    finally:
        _published.reset(token)
    if trouble is None or not (is_permanent(trouble) or left_ms <= 0):
        republish.undelivered(task, request, trouble, left_ms)
    logger.critical(
        "idempotency: %s[%s] is done, but its callbacks cannot be sent: %s",
        task.name,
        request.id,
        type(trouble).__name__,
    )
    return trouble


def _celery_sends_it(request: Context) -> bool:
    """Can this not come back (an eager call, or one without an id)? Then Celery sends, here and now."""
    return bool(request.is_eager or not request.id)


def _send_success(
    task: IdempotentTask, request: AnyRequest, value: object
) -> None:  # its stub takes a chain for a text
    """Send what follows a success, as Celery's tracer does."""
    app = task.app
    inherited = app.conf.task_inherit_parent_priority
    options = {
        "parent_id": request.id,
        "root_id": request.root_id or request.id,
        "priority": (request.delivery_info or {}).get("priority") if inherited else None,
    }
    publish = getattr(app.amqp, "_retry_publish", _call)  # Celery >= 5.7
    links: list[Any] = [maybe_signature(each, app=app) for each in request.callbacks or ()]
    if len(links) > 1:
        # Those that are groups by themselves: each notes its members as children of this task.
        groups = [each for each in links if isinstance(each, group)]
        single = [each for each in links if not isinstance(each, group)]
        links = [*groups, *([group(single, app=app)] if single else [])]
    for link in links:
        publish(link.apply_async, (value,), **options)
    request.callbacks = None
    if request.chain:
        *rest, step = request.chain
        following = cast("Sig", maybe_signature(step, app=app))
        publish(following.apply_async, (value,), chain=rest, **options)
        request.chain = None
    backend = retryable(task.backend)
    stored = not storing.ignores_result(task, request)
    backend.mark_as_done(request.id, value, backend.prepared(request), stored)


def _send_failure(task: IdempotentTask, request: Context, error: Exception) -> None:
    """Send what follows a failure, as Celery's tracer does."""
    failure = get_pickleable_exception(error)
    info = ExceptionInfo((type(failure), failure, error.__traceback__))
    stored = not storing.ignores_result(task, request) or task.store_errors_even_if_ignored
    backend = retryable(task.backend)
    backend.mark_as_failure(
        str(request.id), failure, info.traceback, request=request, store_result=stored
    )


def _call(publish: Callable[..., object], *args: object, **options: object) -> object:
    return publish(*args, **options)


def note_published(headers: object = None, **_: object) -> None:
    """Note that this delivery has published a message (``after_task_publish``)."""
    published = _published.get()
    if published is not None and isinstance(headers, Mapping):
        published.add(str(headers.get("id")))


def _forget_published(request: Context) -> None:
    """Leave in the request, and so in the message that comes back, only the callbacks that are not sent yet.

    ::

        links A, B, C     A sent ─ B: the broker is gone ─ the message comes back with B, C ─ B, C sent
    """
    published = _published.get() or set()
    for name in ("callbacks", "errbacks"):
        left = [each for each in getattr(request, name) or () if not _is_sent(each, published)]
        setattr(request, name, left or None)


def _is_sent(callback: AnySignature, published: set[str]) -> bool:
    ids = [str((task.get("options") or {}).get("task_id")) for task in canvas_tasks(callback)]
    if callback.get("task") == "celery.chain":
        ids = ids[:1]  # the first step carries the others
    return bool(ids) and published.issuperset(ids)
