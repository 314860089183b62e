"""What the outbox stores of a call: all of it, so that nothing depends on when it is sent."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING, cast

from kombu import serialization

from celery_idempotent.celery.models import with_dumped_models
from celery_idempotent.celery.typed import Options
from celery_idempotent.errors import IdempotencyError, InvalidOption
from celery_idempotent.serializers import NotStored, Serializer, decode, from_bytes, to_bytes

if TYPE_CHECKING:
    from celery import Celery

#: The largest call that can be staged, serialized.
MAX_BYTES = 1024 * 1024

#: Options that belong to the process which sends: its connection to the broker, and its router.
SENDER_OPTIONS = ("producer", "publisher", "connection", "router")


@dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A call of a task. ``once``: its key is to be reserved before it is sent (``idempotency_publish_once``)."""

    task: str
    args: Sequence[object] | None
    kwargs: Mapping[str, object] | None
    options: Options
    once: bool = False


def dump(app: Celery, payload: Payload, serializer: str | None) -> bytes:
    """Serialize a call as its message would be.

    Raises:
        IdempotencyError: if it cannot be, could not be read again, or is too large.
    """
    name = serializer or app.conf.task_serializer
    call = {line.name: getattr(payload, line.name) for line in fields(payload)}
    content = dict(with_dumped_models(app, call))
    try:
        stored = Serializer(name, app.conf.accept_content).dump(content, max_bytes=MAX_BYTES)
    except InvalidOption:
        raise IdempotencyError(
            f"A call of {payload.task} is serialized as {name!r}, which this app does not accept: it could not be read "
            "again when it is sent. Add it to accept_content, or stage it with another serializer."
        ) from None
    if isinstance(stored, NotStored):
        raise IdempotencyError(
            f"A call of {payload.task} cannot be staged: it is {stored.reason}"
            + (
                f", {stored.size} bytes where {MAX_BYTES} are allowed. Hand over a reference instead."
                if stored.size
                else f" as {name!r}, with its options."
            )
        )
    return to_bytes(stored)


def load(app: Celery, content: bytes) -> Payload:
    """Return what :func:`dump` wrote.

    Raises:
        ContentDisallowed: if the app does not accept its format.
        DecodeError: if it cannot be read.
    """
    accept = serialization.prepare_accept_content(app.conf.accept_content)
    found = cast("Options", decode(from_bytes(content), accept))
    return Payload(**found)


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
    now = datetime.now(timezone.utc)
    for name, given in (("eta", "countdown"), ("expires", "expires")):
        value = kept.get(given)
        if given == "countdown":
            kept.pop(given, None)
        if isinstance(value, numbers.Real) and (value or given == "expires"):
            kept[name] = now + timedelta(seconds=float(value))
        if isinstance(kept.get(name), datetime):
            kept[name] = kept[name].isoformat()
    return kept
