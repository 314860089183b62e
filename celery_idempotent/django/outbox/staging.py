"""Staging in the transactional outbox: messages that are committed with the data they are about, and sent after that.

A message is a row of the transaction that stages it, complete: task id, key, fingerprint, absolute times. Its process
sends it after COMMIT; what a dead process left, a sweep sends, under the same task id::

    BEGIN ─ stage m1 ─ stage m2 ─ COMMIT ─┬─ send m1 ─ delete ─ send m2 ─┬─ delete
                                          └─ ✗ a sweep sends m1, m2      └─ ✗ a sweep sends m2 again: absorbed

A message that cannot be sent stays where it is, its error beside it; later ones of its group wait behind it.
"""

from __future__ import annotations

import logging
import uuid
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from celery.canvas import Signature, maybe_signature
from celery.utils import uuid as new_id
from django.db import connections, transaction

from celery_idempotent.celery.definition import is_celerys_own
from celery_idempotent.celery.publishing import Args, DeferredCall, Kwargs, outbox_interceptor
from celery_idempotent.celery.task import IdempotentTask
from celery_idempotent.celery.typed import AnyTask, Options, Result, Sig
from celery_idempotent.django.outbox import rows
from celery_idempotent.django.outbox.models import OutboxMessage
from celery_idempotent.django.outbox.payload import Payload, absolute, dump, fixed
from celery_idempotent.django.outbox.sending import name_of, publish_staged, send_one
from celery_idempotent.errors import IdempotencyError, StoreMisconfigured
from celery_idempotent.identity.identified import MAX_CHARS, Identified
from celery_idempotent.identity.stamp import as_mapping, stamp_of
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)


class _MessageGroup:
    """What one transaction staged for one app, and whether its sending came to a stop."""

    __slots__ = ("blocked", "lease", "named")

    def __init__(self, using: str, app: str, name: str | None) -> None:
        self.named = name is not None
        self.lease = rows.GroupLease(using, app, name or uuid.uuid4().hex)
        self.blocked = False


@dataclass(frozen=True, slots=True)
class _AfterCommit:
    """Sends one message; the bytes, not the caller's objects, which may change before the commit."""

    app: Celery
    group: _MessageGroup
    pk: int
    label: str
    content: bytes

    def __call__(self) -> None:
        """Send it; whatever fails, the transaction is committed, and a sweep goes on."""
        group, lease = self.group, self.group.lease
        if group.blocked:
            return
        group.blocked = True  # unless all goes well
        try:
            if group.named and rows.has_earlier(lease, self.pk):
                lease.give_back()
                return
            if not lease.hold():
                return
            publishing = partial(publish_staged, self.app, self.content)
            error = send_one(publishing, lease.using, self.pk, self.label)
            if error is not None:
                lease.fail(self.pk, error)
                return
        except Exception:
            logger.exception("idempotency: staged message %s is left to the sweep", self.label)
            return
        group.blocked = False


def stage(
    task: AnyTask | Sig,
    args: Any = None,  # to Celery's stubs a tuple and a dict alone
    kwargs: Any = None,
    options: Options | None = None,
    *,
    using: str = "default",
    group: str | None = None,
) -> str | None:
    """Stage a call of a task, or a whole canvas, in the transaction at work on the database ``using``.

    It is sent if that transaction commits. ``options`` are those of ``apply_async``. Messages of one app and
    ``group`` (a name of up to 64 characters; by default, all that this transaction stages) are sent in order. Returns
    the task id (of a canvas: of its last task, or of its group), ``None`` if the task's own ``apply_async`` chose not
    to publish.

    Raises:
        IdempotencyError: outside of a transaction, or if the call cannot be serialized, or is too large.
        InvalidKey: as ``apply_async``.
        StoreMisconfigured: where no sweep looks after that database.
    """
    if not connections[using].in_atomic_block:
        raise IdempotencyError(
            f"Nothing can be staged outside of a transaction: wrap it in transaction.atomic(using={using!r}), or "
            "publish with apply_async."
        )
    _check_swept(task.app, using)
    if group is not None and not 0 < len(group) <= 64:
        raise IdempotencyError("The name of an outbox group has 1 to 64 characters.")
    options = dict(options or {})
    if not _stamps_itself(task):
        if not isinstance(task, Signature):
            task = task.signature(args, kwargs, **options)
            args, kwargs, options = None, None, {}
        return _stage_canvas(task, args, kwargs, options, using, group)
    staged: list[str] = []

    def intercept(task: IdempotentTask, call: DeferredCall) -> Result:
        staged.append(_stage_call(task, call, using, group))
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


def _stamps_itself(task: object) -> bool:
    """Is this one call of a task that stamps its calls itself, or a chain, which is one call of its first task?"""
    if isinstance(task, Signature):
        kind, app = str(task.task), task.app
        if kind == "celery.chain":
            steps = task.kwargs["tasks"]
            return bool(steps) and _stamps_itself(maybe_signature(steps[0], app=app))
        task = app.tasks.get(kind)
    return isinstance(task, IdempotentTask) and not is_celerys_own(task)


def _stage_call(task: IdempotentTask, call: DeferredCall, using: str, group: str | None) -> str:
    """Stage one call that is stamped already; return its task id.

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
    payload = Payload(
        task=str(task.name),
        args=call.args,
        kwargs=call.kwargs,
        options=options,
        stamped=True,
        once=call.reserve,
    )
    definition = task.idempotency_definition()
    stamped = stamp_of(as_mapping(options.get("headers")), task_id)
    identified = (
        Identified.from_header(stamped, definition.identifier.namespace) if definition else None
    )
    message = OutboxMessage(task_id=task_id[:MAX_CHARS])
    if identified is not None:
        message.key, message.scope = identified.identity.key, identified.identity.scope
    _insert_message(
        task.app, message, payload, options.get("serializer") or task.serializer, using, group
    )
    return task_id


def _stage_canvas(
    canvas: Sig,
    args: Args,
    kwargs: Kwargs,
    options: Options,
    using: str,
    group: str | None,
) -> str:
    """Stage any signature as it is: its parts are stamped when they are published, from ids that are fixed now."""
    app = canvas.app
    if canvas.task == "celery.chunks":
        chunks: Any = canvas
        canvas = chunks.group()
    whole = fixed(app, canvas)
    options = absolute(options, task=str(canvas.task))
    _adopt(app, options)
    # Frozen for its id alone: what is stored is what the caller built.
    task_id = str(
        options.get("task_id") or Signature.from_dict(fixed(app, whole), app=app).freeze().id
    )
    payload = Payload(
        task=str(canvas.task),
        args=args,
        kwargs=kwargs,
        options=options,
        stamped=False,
        canvas=whole,
    )
    _insert_message(app, OutboxMessage(task_id=task_id[:MAX_CHARS]), payload, None, using, group)
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


def _insert_message(
    app: Celery,
    message: OutboxMessage,
    payload: Payload,
    serializer: str | None,
    using: str,
    name: str | None,
) -> None:
    group = _group(using, name_of(app), name)
    message.task, message.app = payload.task[:MAX_CHARS], group.lease.app
    message.group, message.holder = group.lease.group, group.lease.holder
    message.payload = content = dump(app, payload, serializer)
    pk = rows.add(using, message)
    transaction.on_commit(_AfterCommit(app, group, pk, str(message), content), using=using)


def _group(using: str, app: str, name: str | None) -> _MessageGroup:
    """Return what the transaction at work staged for this app, or a group for this message alone.

    The latter is for a name, and looks for older messages itself. Django has what it will call after the commit in a
    list, which ends with the transaction: a group that is in it belongs to no earlier one.
    """
    if name is None:
        for entry in reversed(connections[using].run_on_commit):
            call = entry[1]
            if (
                isinstance(call, _AfterCommit)
                and not call.group.named
                and call.group.lease.app == app
            ):
                return call.group
    return _MessageGroup(using, app, name)
