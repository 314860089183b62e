"""Celery signal receivers, and the names of the headers that carry a key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from celery.signals import before_task_publish, worker_init

from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery_idempotent.keys import Identified

__all__ = [
    "KEY_HEADER",
    "SCOPE_HEADER",
    "STAMP_HEADER",
    "as_mapping",
    "leaves",
    "stamp",
    "stamp_of",
]

#: What a publisher of any language may set: the raw key (str, int, or a list of these) and scope.
KEY_HEADER = "idempotency_key"
SCOPE_HEADER = "idempotency_scope"

#: Task id, canonical key, scope and fingerprint, computed once when the message was first published.
STAMP_HEADER = "idempotency"


def stamp(identified: Identified, task_id: str) -> dict[str, str]:
    """Return the stamp of the message with this task id."""
    return {"id": task_id, **identified.to_header()}


def stamp_of(headers: Mapping[str, Any], task_id: str | None) -> object:
    """Return the stamp of the message with this task id, or ``None``.

    A task that hands its own headers on to another call (tracing does) hands on a stamp that is not the other's.
    """
    found = headers.get(STAMP_HEADER)
    if isinstance(found, Mapping) and found.get("id") != task_id:
        return None
    return found


@before_task_publish.connect(weak=False, dispatch_uid="celery_idempotent.carry_key")
def carry_key(headers: Any = None, properties: Any = None, **_: Any) -> None:
    """Move a key given to ``app.send_task("name", idempotency_key=...)`` into the headers.

    Celery makes an option that it does not know a message property, which RabbitMQ drops (CELERY.md, "how a key
    travels"); an ``IdempotentTask`` publishing itself has taken its key out of the options already.
    """
    if not isinstance(headers, dict) or not isinstance(properties, dict):
        return
    for name in (KEY_HEADER, SCOPE_HEADER):
        if name in properties:
            value = properties.pop(name)
            headers.setdefault(name, value)


@worker_init.connect(weak=False, dispatch_uid="celery_idempotent.open_store")
def open_store(sender: Any = None, **_: Any) -> None:
    """Make the store before the pool's processes are forked: they inherit its modules, and import none of them."""
    if any(hasattr(task, "identify_delivery") for task in sender.app.tasks.values()):
        get_store(sender.app)


def leaves(signature: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the signatures of single tasks in a canvas."""
    if not isinstance(signature, Mapping):
        return
    kwargs = signature.get("kwargs") or {}
    if str(signature.get("task")) not in {"celery.chain", "celery.group", "celery.chord"}:
        yield signature
        return
    for part in ("tasks", "header", "body"):
        inner = kwargs.get(part)
        for each in inner if isinstance(inner, (list, tuple)) else [inner]:
            yield from leaves(each)


def as_mapping(headers: object) -> dict[str, Any]:
    """Return a copy of headers, or none where they are no mapping: Celery passes on whatever it is given."""
    return dict(headers) if isinstance(headers, Mapping) else {}
