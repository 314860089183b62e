"""What the outbox stores of a call: all of it, so that nothing depends on when it is sent."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any, cast

from kombu import serialization

from celery_idempotent.celery.models import with_dumped_models
from celery_idempotent.celery.publishing import DeferredCall
from celery_idempotent.errors import IdempotencyError, InvalidOption
from celery_idempotent.serializers import NotStored, Serializer, decode, from_bytes, to_bytes

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.typed import AnyTask, Options

#: The largest call that can be staged, serialized.
MAX_BYTES = 1024 * 1024

#: Options that belong to the process which sends: its connection to the broker, and its router.
SENDER_OPTIONS = ("producer", "publisher", "connection", "router")


def dump(task: AnyTask, call: DeferredCall, options: Options) -> bytes:
    """Serialize a call with these options as its message would be.

    Raises:
        IdempotencyError: if it cannot be, could not be read again, or is too large.
    """
    app, name = task.app, options.get("serializer") or task.serializer
    name = name or app.conf.task_serializer
    content: Options = {"task": str(task.name), "args": call.args, "kwargs": call.kwargs}
    content |= {"options": options, "reserve": call.reserve}
    try:
        stored = Serializer(name, app.conf.accept_content).dump(
            dict(with_dumped_models(app, content)), max_bytes=MAX_BYTES
        )
    except InvalidOption:
        raise IdempotencyError(
            f"A call of {task.name} is serialized as {name!r}, which this app does not accept: it could not be read "
            "again when it is sent. Add it to accept_content, or stage it with another serializer."
        ) from None
    if isinstance(stored, NotStored):
        raise IdempotencyError(
            f"A call of {task.name} cannot be staged: it is {stored.reason}"
            + (
                f", {stored.size} bytes where {MAX_BYTES} are allowed. Hand over a reference instead."
                if stored.size
                else f" as {name!r}, with its options."
            )
        )
    return to_bytes(stored)


def load(app: Celery, content: bytes) -> tuple[str, DeferredCall]:
    """Return what :func:`dump` wrote: the task's name, and the call.

    Raises:
        ContentDisallowed: if the app does not accept its format.
        DecodeError: if it cannot be read.
    """
    accept = serialization.prepare_accept_content(app.conf.accept_content)
    found = cast("dict[str, Any]", decode(from_bytes(content), accept))
    return found.pop("task"), DeferredCall(**found)


def absolute(options: Mapping[str, object], *, task: str) -> Options:
    """Return options that mean the same whenever the message is sent: delays become points in time.

    Raises:
        IdempotencyError: for an option that means something in this process only.
    """
    kept: Options = dict(options)
    if found := [name for name in SENDER_OPTIONS if kept.pop(name, None) is not None]:
        raise IdempotencyError(
            f"A call of {task} cannot be staged with {', '.join(found)}: who sends it has a connection of its own."
        )
    now, countdown = datetime.now(timezone.utc), kept.pop("countdown", None)
    if countdown:
        kept["eta"] = countdown
    for name in ("eta", "expires"):
        value = kept.get(name)
        if isinstance(value, numbers.Real):
            value = now + timedelta(seconds=float(value))
        if isinstance(value, datetime):
            kept[name] = value.isoformat()
    return kept
