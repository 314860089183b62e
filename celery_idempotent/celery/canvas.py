"""The tasks of a canvas: the one walk over them, and the changes that it makes.

::

    chain(a, group(b, c), chord([d], e))    a (0,)   b (1, 0)   c (1, 1)   d (2, 0)   e (2, "body")
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from celery.canvas import maybe_signature
from celery.utils.functional import maybe_list

from celery_idempotent.celery.typed import Sig
from celery_idempotent.keys.stamp import STAMP_HEADER, as_mapping, stamp_of

if TYPE_CHECKING:
    from celery import Celery

#: The way from the root of a canvas to one of its tasks.
Place = tuple[int | str, ...]
#: A signature: ``dict``, what JSON made of one, or one of Celery's classes.
AnySignature = Mapping[str, Any]

#: The ``kwargs`` that hold the parts of a canvas.
PARTS = {"celery.chain": ("tasks",), "celery.group": ("tasks",), "celery.chord": ("header", "body")}


def with_tasks(
    signature: object, change: Callable[[AnySignature, Place], AnySignature], place: Place = ()
) -> Any:
    """Return a copy of a canvas, or of a single task, with ``change(task, place)`` for each of its tasks."""
    if not isinstance(signature, Mapping):
        return signature
    names = PARTS.get(str(signature.get("task")))
    if names is None:
        return change(signature, place)
    kwargs = dict(signature.get("kwargs") or {})
    for name in names:
        inner = kwargs.get(name)
        if isinstance(inner, (list, tuple)):
            kwargs[name] = [
                with_tasks(each, change, (*place, index)) for index, each in enumerate(inner)
            ]
        elif inner is not None:
            kwargs[name] = with_tasks(inner, change, (*place, name))
    return {**signature, "kwargs": kwargs}


def canvas_tasks(signature: object) -> list[AnySignature]:
    """Return the signatures of the tasks of a canvas, no copies."""
    found: list[AnySignature] = []

    def note(task: AnySignature, _: Place) -> AnySignature:
        found.append(task)
        return task

    with_tasks(signature, note)
    return found


def unstamp(signature: object, task_id: str | None) -> None:
    """Remove the stamp of the message with this task id, whose headers a replacement copies."""
    for task in canvas_tasks(signature):
        options = task.get("options") or {}
        headers = as_mapping(options.get("headers"))
        if isinstance(task, dict) and stamp_of(headers, task_id) is not None:
            del headers[STAMP_HEADER]
            task["options"] = {**options, "headers": headers}


def derive_ids(app: Celery, links: Sig | Sequence[Sig], parent_id: str, kind: str) -> object:
    """Return ``links`` with task ids made from the parent's id: sent twice after a crash, they keep their ids."""

    def with_id(task: AnySignature, place: Place) -> AnySignature:
        options = task.get("options") or {}
        path = "/".join(map(str, (parent_id, kind, *place)))
        task_id = options.get("task_id") or str(uuid.uuid5(uuid.NAMESPACE_URL, path))
        return {**task, "options": {**options, "task_id": task_id}}

    return [
        maybe_signature(with_tasks(link, with_id, (index,)), app=app)
        for index, link in enumerate(maybe_list(links))
    ]
