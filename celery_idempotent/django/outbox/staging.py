"""Staging in the transactional outbox: messages that are committed with the data they are about, and sent after that.

A message is a row of the transaction that stages it, complete: task id, key, fingerprint, absolute times. Its process
sends it after COMMIT; what a dead process left, a sweep sends, under the same task id::

    BEGIN ─ stage m1 ─ stage m2 ─ COMMIT ─┬─ send m1 ─ delete ─ send m2 ─┬─ delete
                                          └─ ✗ a sweep sends m1, m2      └─ ✗ a sweep sends m2 again: absorbed

A message that cannot be sent stays where it is, its error beside it.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from celery.canvas import Signature, maybe_signature
from celery.utils import uuid as new_id
from django.db import connections, transaction

from celery_idempotent.celery.definition import DefinedTask, is_celerys_own
from celery_idempotent.celery.publishing import (
    DeferredCall,
    give_ids_to_callbacks,
    outbox_interceptor,
)
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.celery.typed import AnyTask, Options, Result, Sig
from celery_idempotent.django.outbox import rows
from celery_idempotent.django.outbox.models import OutboxMessage
from celery_idempotent.django.outbox.payload import Payload, absolute, dump
from celery_idempotent.django.outbox.sending import name_of, send_after_commit
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured
from celery_idempotent.keys.stamp import MAX_CHARS, Identified, as_mapping, stamp_of
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery


def stage(
    task: AnyTask | Sig,
    args: Any = None,  # to Celery's stubs a tuple and a dict alone
    kwargs: Any = None,
    options: Options | None = None,
    *,
    using: str = "default",
) -> str | None:
    """Stage a call of a task in the transaction at work on the database ``using``; it is sent if that commits.

    ``options`` are those of ``apply_async``. Returns the task id, ``None`` if the task's own ``apply_async`` chose not
    to publish. ``task`` may be a signature whose call is one message: of a task, or a chain that an idempotent task
    leads.

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
    _check_swept(task.app, using)
    options = dict(options or {})
    leader = _leader(task)
    if not isinstance(leader, IdempotentTask):
        if isinstance(task, Signature):
            whole: Any = task.clone(args, kwargs, **options)
            args, kwargs, options = whole.args, whole.kwargs, dict(whole.options)
        give_ids_to_callbacks(task.app, options)
        return _stage_call(leader, DeferredCall(args=args, kwargs=kwargs, options=options), using)
    staged: list[str] = []

    def intercept(task: DefinedTask, call: DeferredCall) -> Result:
        staged.append(_stage_call(task, call, using))
        return task.AsyncResult(staged[-1])

    before = outbox_interceptor.set(intercept)
    try:
        result = task.apply_async(args, kwargs, **options)
    finally:
        outbox_interceptor.reset(before)
    return str(getattr(result, "id", staged[-1])) if staged else None


def _check_swept(app: Celery, using: str) -> None:
    """Raise where no sweep would send the messages of a process that died."""
    swept = get_store(app).outbox_alias
    if swept != using:
        raise StoreMisconfigured(
            f"Messages staged in the database {using!r} are swept where idempotency_store is django://{using} or a "
            f"hybrid of it; here {'no outbox is' if swept is None else f'that of {swept!r} is'}."
        )


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
    """Stage one call, of an idempotent task one that is stamped already; return its task id.

    All that would be found out at the time of sending is written down now: absolute times, the task's own ``expires``,
    whose child it is, and that its arguments fit. A sweep that sends it tomorrow knows none of that.
    """
    check = getattr(task, "__header__", None) if task.typing else None
    if check is not None:
        check(*(call.args or ()), **(call.kwargs or {}))
    given = call.options if "expires" in call.options else {**call.options, "expires": task.expires}
    options = absolute(given, task=str(task.name))
    task_id = options["task_id"] = str(options.get("task_id") or new_id())
    _adopt(task.app, options)
    options["root_id"] = options.get("root_id") or task_id
    options["reply_to"] = options.get("reply_to") or task.app.thread_oid
    message = OutboxMessage(
        task=str(task.name)[:MAX_CHARS], task_id=task_id[:MAX_CHARS], app=name_of(task.app)
    )
    if isinstance(task, IdempotentTask) and (definition := task.idempotency_definition()):
        stamped = stamp_of(as_mapping(options.get("headers")), task_id)
        identified = Identified.from_header(stamped, definition.identifier.namespace)
        if identified is not None:
            message.key, message.scope = identified.identity.key, identified.identity.scope
    payload = Payload(
        task=str(task.name),
        args=call.args,
        kwargs=call.kwargs,
        options=options,
        once=call.reserve,
    )
    # The bytes, not the caller's objects, which may change before the commit.
    message.payload = content = dump(
        task.app, payload, options.get("serializer") or task.serializer
    )
    staged_at = time.monotonic()
    pk = rows.add(using, message)
    send = partial(send_after_commit, task.app, using, pk, str(message), content, staged_at)
    transaction.on_commit(send, using=using)
    return task_id


def _adopt(app: Celery, options: Options) -> None:
    """Note whose child this call is: a sweep that sends it is no task."""
    parent = app.current_worker_task
    if not parent:
        return
    request = parent.request
    options["root_id"] = options.get("root_id") or request.root_id or request.id
    options["parent_id"] = options.get("parent_id") or request.id
    priority = (request.delivery_info or {}).get("priority")
    if app.conf.task_inherit_parent_priority and priority is not None:
        options.setdefault("priority", priority)
