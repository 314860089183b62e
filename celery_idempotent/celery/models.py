"""Pydantic models among the arguments of a call, which Celery 5.7 dumps where the task has ``pydantic=True``.

Celery does so when it sends the message. What is made of a call before that has to have the same::

    task.delay(Order(id=17)) ─ fingerprint of {"id": 17} ─ stored for later: {"id": 17} ─ sent: {"id": 17}
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_idempotent.celery.typed import AnyTask
from celery_idempotent.identity.keys import AsSent
from celery_idempotent.identity.trees import AnySignature, Place, with_tasks

if TYPE_CHECKING:
    from celery import Celery


def dump_of(task: AnyTask | type[AnyTask] | None) -> AsSent | None:
    """Return what dumps the models that a task is called with, ``None`` if they are sent as they are."""
    return getattr(task, "_dump_pydantic_arguments", None)


def with_dumped_models(app: Celery, signature: AnySignature) -> AnySignature:
    """Return a call, or a copy of a canvas, with the arguments that its messages will carry."""

    def change(task: AnySignature, _: Place) -> AnySignature:
        dump = dump_of(app.tasks.get(str(task.get("task"))))
        if dump is None:
            return task
        args, kwargs = dump(task.get("args"), task.get("kwargs"))
        return {**task, "args": args, "kwargs": kwargs}

    changed: AnySignature = with_tasks(signature, change)
    return changed
