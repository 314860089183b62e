"""The tasks of a canvas: the one walk over the signatures of chains, groups and chords, which are nested mappings.

Each task has a place: the way to it from the root. Ids are made from places, so they never change::

    chain(a, group(b, c), chord([d], e))    a (0,)   b (1, 0)   c (1, 1)   d (2, 0)   e (2, "body")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from celery_idempotent.keys.stamp import STAMP_HEADER, as_mapping, stamp_of

Place = tuple[int | str, ...]
#: A signature: ``dict``, what JSON made of one, or one of Celery's classes.
AnySignature = Mapping[str, Any]

#: Which of its ``kwargs`` hold the parts of a canvas.
PARTS = {
    "celery.chain": ("tasks",),
    "celery.group": ("tasks",),
    "celery.chord": ("header", "body"),
}
#: Which of them holds the task that runs last; a group has no last task.
_LAST = {"celery.chain": "tasks", "celery.chord": "body"}


def with_tasks(
    signature: object, change: Callable[[AnySignature, Place], AnySignature], place: Place = ()
) -> Any:
    """Return a copy of a canvas, or of a single task, with ``change(task, place)`` for each of its tasks.

    The signatures that it is given stay as they are: the caller may publish them again.
    """
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


def with_last_task(signature: object, change: Callable[[AnySignature], AnySignature]) -> Any:
    """Return a copy of a canvas with ``change(task)`` for what runs last in it, which may be a group.

    That is where a callback of the whole canvas belongs::

        chain(a, chord([b, c], d))    the body of the last part: d
        chain(a, group(b, c))         the group: its members run beside each other, and none is the last
    """
    if not isinstance(signature, Mapping):
        return signature
    name = _LAST.get(str(signature.get("task")), "")
    kwargs = signature.get("kwargs") or {}
    inner = kwargs.get(name)
    if not inner:
        return change(signature)
    if isinstance(inner, (list, tuple)):
        inner = [*inner[:-1], with_last_task(inner[-1], change)]
    else:
        inner = with_last_task(inner, change)
    return {**signature, "kwargs": {**kwargs, name: inner}}


def canvas_tasks(signature: object) -> list[AnySignature]:
    """Return the signatures of the tasks of a canvas: those that it has, no copies."""
    found: list[AnySignature] = []

    def note(task: AnySignature, _: Place) -> AnySignature:
        found.append(task)
        return task

    with_tasks(signature, note)
    return found


def unstamp(signature: object, task_id: str | None) -> None:
    """Remove from a canvas the stamp of the message with this task id, whose headers a replacement copies."""
    for task in canvas_tasks(signature):
        options = task.get("options") or {}
        headers = as_mapping(options.get("headers"))
        if isinstance(task, dict) and stamp_of(headers, task_id) is not None:
            del headers[STAMP_HEADER]
            task["options"] = {**options, "headers": headers}
