"""The outbox: messages that are committed with the data they are about, and sent after that.

A message is a row of the transaction that stages it: task id, key, fingerprint, absolute times. Its process sends it
after COMMIT, and deletes it once the broker has it; a sweep sends the same message if that process died::

    BEGIN ─ stage m1 ─ stage m2 ─ COMMIT ─┬─ send m1 ─ delete ─ send m2 ─┬─ delete
                                          └─ ✗ a sweep sends m1, m2      └─ ✗ a sweep sends m2 again: absorbed

Until ``due_ms`` a message is its sender's. After that one conditional UPDATE of that time takes it: no row is locked
while a message is sent. One that cannot be sent stays, with its error, and rests longer after each failure.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakKeyDictionary

from celery.canvas import Signature, maybe_signature
from celery.utils import uuid as new_id
from django.db import DatabaseError, connections, transaction
from kombu import pools
from kombu.exceptions import OperationalError

from celery_idempotent.celery.codec import as_sent
from celery_idempotent.celery.definition import DefinedTask, is_celerys_own
from celery_idempotent.celery.publishing import (
    DeferredCall,
    absolute,
    give_ids_to_callbacks,
    outbox_interceptor,
)
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.celery.typed import AnyTask, CallResult, Options, Sig
from celery_idempotent.django.fields import NowMs
from celery_idempotent.errors import IdempotencyError, InvalidOption, StoreMisconfigured
from celery_idempotent.keys.stamp import MAX_CHARS, Identified, as_mapping, stamp_of
from celery_idempotent.serializers import (
    NotStored,
    Serializer,
    first_accepted,
    from_bytes,
    to_bytes,
)
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from django.db.models import QuerySet

    from celery_idempotent.django.models import OutboxMessage

__all__ = ["stage", "sweep"]

logger = logging.getLogger(__name__)

#: How long the sender of a message is left alone: from the staging, or from when somebody took the message.
LEASE_MS = 60_000
#: A message that could not be sent rests this long, doubled with every failure, up to the longest.
BACKOFF_MS = 1_000
LONGEST_BACKOFF_MS = 5 * 60_000
#: The most messages that one sweep tries, and the longest it works: the next one goes on where it stopped.
LIMIT = 10_000
BUDGET_SECONDS = 25.0
#: For so long after a message that did not reach the broker, others are not tried after their COMMIT.
UNREACHED_SECONDS = 1.0
#: How long a broker may take to confirm a message; after that it is sent again, under the same task id.
CONFIRM_SECONDS = 10
#: The largest call that can be staged, serialized.
MAX_BYTES = 1024 * 1024
#: How much of an error is kept for operators.
ERROR_CHARS = 500

#: Until when an app that did not reach its broker leaves its messages to the sweep (``time.monotonic``).
_unreached_until: WeakKeyDictionary[Celery, float] = WeakKeyDictionary()
#: To the last @ of the word: a password that was not quoted may contain one, or a slash.
_CREDENTIALS = re.compile(r"://\S*@")


# -- staging -----------------------------------------------------------------------------------------------------------


def stage(
    task: AnyTask | Sig,
    args: Any = None,  # to Celery's stubs a tuple and a dict alone
    kwargs: Any = None,
    options: Options | None = None,
    *,
    using: str = "default",
) -> str | None:
    """Stage a call of a task in the open transaction of the database ``using``; it is sent if that commits.

    ``task`` may be a signature whose call is one message: of a task, or a chain that an idempotent task leads;
    ``options`` are those of ``apply_async``. Returns the task id, ``None`` if the task's own ``apply_async`` chose not
    to publish.

    Raises:
        IdempotencyError: outside of a transaction, for any other canvas, or if the call cannot be serialized, or is too
            large.
        InvalidKey: as ``apply_async``.
        StoreMisconfigured: where no sweep looks after that database.
    """
    if not connections[using].in_atomic_block:
        raise IdempotencyError(
            f"Nothing can be staged outside of a transaction: wrap it in transaction.atomic(using={using!r}), or "
            "publish with apply_async."
        )
    swept = get_store(task.app).outbox_alias
    if swept != using:
        raise StoreMisconfigured(
            f"Messages staged in the database {using!r} are sent only if idempotency_store is django://{using} or a "
            f"hybrid of it; here {'there is no outbox' if swept is None else f'it is that of {swept!r}'}."
        )
    options = dict(options or {})
    leader = _leader(task)
    if not isinstance(leader, IdempotentTask):
        if isinstance(task, Signature):
            whole: Any = task.clone(args, kwargs, **options)
            args, kwargs, options = whole.args, whole.kwargs, dict(whole.options)
        give_ids_to_callbacks(task.app, options)
        return _stage_call(leader, DeferredCall(args=args, kwargs=kwargs, options=options), using)
    staged: list[str] = []

    def intercept(task: DefinedTask, call: DeferredCall) -> CallResult:
        staged.append(_stage_call(task, call, using))
        return task.AsyncResult(staged[-1])

    before = outbox_interceptor.set(intercept)
    try:
        result = task.apply_async(args, kwargs, **options)
    finally:
        outbox_interceptor.reset(before)
    return str(getattr(result, "id", staged[-1])) if staged else None


def _leader(call: AnyTask | Sig) -> AnyTask:
    """Return the task whose message a call is: a chain is one call of its first task.

    Raises:
        IdempotencyError: for a canvas that is more than one message.
    """
    app, first = call.app, cast("Any", call)
    while isinstance(first, Signature) and first.task == "celery.chain" and first.kwargs["tasks"]:
        first = maybe_signature(first.kwargs["tasks"][0], app=app)
    task: AnyTask = app.tasks[str(first.task)] if isinstance(first, Signature) else first
    if is_celerys_own(task) or (first is not call and not isinstance(task, IdempotentTask)):
        what = str(task.name) if first is call else f"a chain that {task.name} leads"
        raise IdempotencyError(
            f"A canvas ({what}) cannot be staged: it is more than one message. Stage a task that publishes it, or "
            "publish it with transaction.on_commit(), which loses it if the process dies there."
        )
    return task


def _stage_call(task: AnyTask, call: DeferredCall, using: str) -> str:
    """Stage one call, that of an idempotent task with its stamp; return its task id.

    Whatever depends on this moment or on the running task is resolved now: a sweep may send it tomorrow.
    """
    app, name = task.app, str(task.name)
    check = getattr(task, "__header__", None) if task.typing else None
    if check is not None:
        check(*(call.args or ()), **(call.kwargs or {}))
    options = absolute({"expires": task.expires, **call.options}, task=name)
    task_id = options["task_id"] = str(options.get("task_id") or new_id())
    if parent := app.current_worker_task:
        request = parent.request
        options["root_id"] = options.get("root_id") or request.root_id or request.id
        options["parent_id"] = options.get("parent_id") or request.id
        priority = (request.delivery_info or {}).get("priority")
        if app.conf.task_inherit_parent_priority and priority is not None:
            options.setdefault("priority", priority)
    options["root_id"] = options.get("root_id") or task_id
    options["reply_to"] = options.get("reply_to") or app.thread_oid
    found: Identified | None = None
    if isinstance(task, IdempotentTask) and (definition := task.idempotency_definition()):
        stamped = stamp_of(as_mapping(options.get("headers")), task_id)
        found = Identified.from_header(stamped, definition.identifier.namespace)
    message = _rows(using).create(
        app=_name_of(app),
        task=name[:MAX_CHARS],
        task_id=task_id[:MAX_CHARS],
        key=found.identity.key if found else "",
        scope=found.identity.scope if found else "",
        # Now: the caller's objects may change before the commit.
        payload=_dump(task, call, options),
        created_ms=NowMs(),
        due_ms=NowMs() + LEASE_MS,
    )
    transaction.on_commit(partial(_send_after_commit, app, using, message), using=using)
    return task_id


def _dump(task: AnyTask, call: DeferredCall, options: Options) -> bytes:
    """Serialize a call with these options as its message would be.

    Raises:
        IdempotencyError: if it cannot be, could not be read again, or is too large.
    """
    app = task.app
    name = options.get("serializer") or task.serializer or app.conf.task_serializer
    content: Options = {"task": str(task.name), "args": call.args, "kwargs": call.kwargs}
    content |= {"options": options, "reserve": call.reserve}
    try:
        serializer = Serializer(name, app.conf.accept_content)
        return to_bytes(serializer.dump(as_sent(app, content), max_bytes=MAX_BYTES))
    except (InvalidOption, NotStored) as problem:
        raise IdempotencyError(
            f"A call of {task.name}, with its options, cannot be staged: {problem}"
        ) from None


# -- sending -----------------------------------------------------------------------------------------------------------


def sweep(app: Celery, *, using: str = "default", limit: int = LIMIT) -> tuple[int, int]:
    """Send messages of dead senders, and those that failed before; return how many were sent, and how many not.

    Any number of sweeps may run at once.
    """
    until, messages = time.monotonic() + BUDGET_SECONDS, _rows(using)
    due = messages.filter(app=_name_of(app), due_ms__lte=NowMs()).order_by("due_ms", "pk")
    found = list(due.values_list("pk", flat=True)[:limit])
    if not found:
        return 0, 0
    sent = failed = refused = 0
    for pk in found:
        if time.monotonic() > until:
            break
        try:
            taken = due.filter(pk=pk).order_by().update(due_ms=NowMs() + LEASE_MS)
            message = messages.filter(pk=pk).first() if taken else None
            if message is None:  # another sweep's
                continue
            error = _send(app, using, message, add_to_parent=False)
        except DatabaseError as trouble:  # a locked row, a deadlock with another sweep
            refused, why = refused + 1, error_text(trouble)
            continue
        sent, failed = sent + (error is None), failed + (error is not None)
        if error is not None and _is_unreachable(app, error):
            break
    if refused:
        line = "idempotency: outbox of %s: %d messages are left to the next sweep: %s"
        logger.warning(line, using, refused, why)
    logger.info("idempotency: outbox of %s: %d messages sent, %d could not be", using, sent, failed)
    return sent, failed


def wake(app: Celery, *, using: str) -> None:
    """Let the next sweep send messages that rest after a failure."""
    _rows(using).filter(app=_name_of(app), attempts__gt=0).update(due_ms=0)


def _rows(using: str) -> QuerySet[OutboxMessage]:
    """Return all staged messages of a database, whatever its routers say."""
    from celery_idempotent.django.models import OutboxMessage  # models are made once the apps are

    return OutboxMessage.objects.using(using)


def _name_of(app: Celery) -> str:
    """Return the name under which the messages of this app are staged: each app has its own broker."""
    return str(app.main or "")[:MAX_CHARS]


def _send_after_commit(app: Celery, using: str, message: OutboxMessage) -> None:
    """Send one message after its COMMIT; after a failure it is left to the sweep."""
    if time.monotonic() < _unreached_until.get(app, 0):
        return
    try:
        error = _send(app, using, message)
        if error is not None and _is_unreachable(app, error):
            _unreached_until[app] = time.monotonic() + UNREACHED_SECONDS
    except Exception:
        logger.exception("idempotency: staged message %s is left to the sweep", message)


def _send(app: Celery, using: str, message: OutboxMessage, **options: object) -> Exception | None:
    """Publish a message and forget it; return the error if it cannot be published."""
    row = _rows(using).filter(pk=message.pk)
    try:
        _publish(app, bytes(message.payload), options)
    except Exception as error:  # noqa: BLE001  a broker fails in its own ways, and so does what it is given
        text = error_text(error)
        logger.warning(
            "idempotency: staged message %s could not be sent, and stays: %s", message, text
        )
        rest = min(BACKOFF_MS * 2 ** min(message.attempts, 20), LONGEST_BACKOFF_MS)
        wait = int(rest * random.uniform(0.75, 1.25))
        row.update(attempts=message.attempts + 1, error=text, due_ms=NowMs() + wait)
        return error
    # Should this fail, the message is sent again under the same task id.
    row._raw_delete(using)  # noqa: SLF001  the public one has three statements
    return None


def error_text(error: BaseException) -> str:
    """Return class and message of an error, without the credentials that a URL in it may hold."""
    text = f"{type(error).__name__}: {error}".removesuffix(": ")
    return _CREDENTIALS.sub("://***@", text)[:ERROR_CHARS]


def _publish(app: Celery, content: bytes, options: Options) -> None:
    """Publish what was staged, and return when the broker has it.

    Raises:
        StoreMisconfigured: if the app does not accept its format.
        ResultUnavailable: if it cannot be read.
    """
    accept = app.conf.accept_content
    serializer = Serializer(first_accepted("json", accept), accept)
    found = cast("dict[str, Any]", serializer.load(from_bytes(content)))
    task: Any = app.tasks[found.pop("task")]
    call = DeferredCall(**found)
    with _confirming(app) as confirming:
        call.options.update(options, **confirming)
        if isinstance(task, IdempotentTask):
            task.send_deferred(call)
        else:
            task.apply_async(call.args, call.kwargs, **call.options)


@contextmanager
def _confirming(app: Celery) -> Iterator[Options]:
    """Give the options with which a call waits until the broker has it.

    RabbitMQ takes messages without an answer: what was written to the socket when it died is gone, without an error.
    """
    connection = app.connection_for_write()
    options = connection.transport_options or {}
    if connection.transport.driver_type != "amqp" or options.get("confirm_publish"):
        yield {}
        return
    connection.transport_options = {**options, "confirm_publish": True}
    # After an exception, which may have struck in the middle of a frame, kombu replaces the connection.
    with pools.producers[connection].acquire(block=True) as producer:
        yield {"producer": producer, "confirm_timeout": CONFIRM_SECONDS}


def _is_unreachable(app: Celery, error: Exception) -> bool:
    """Was it the way to the broker that failed, and not something about this message?"""
    connection = app.connection_for_write()
    cause = error.__cause__ or error
    return not isinstance(cause, connection.channel_errors) and isinstance(
        cause, (OperationalError, OSError, *connection.connection_errors)
    )
