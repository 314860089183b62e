"""Pydantic models among the arguments of a task with ``pydantic=True``: a key is made of the validated model.

::

    task.delay(Order(id=7)) ─┐                              ┌─ key 7, before the message is sent
    task.delay({"id": 7})    ├─ {"id": 7} or {"id": "7"} ───┤
    task.delay({"id": "7"}) ─┘                              └─ Order(id=7) ─ key 7, where the message has no stamp
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from types import UnionType
from typing import Any

import celery.app.base
from celery import Celery

from celery_idempotent.celery.trees import AnySignature, Place, with_tasks
from celery_idempotent.celery.typed import AnyTask
from celery_idempotent.keys.rules import Validate


def validation_of(task: type[AnyTask]) -> Validate | None:
    """Return what validates the models among the arguments of a task, ``None`` if Celery validates nothing for it."""
    run = inspect.getattr_static(task, "run")
    run = getattr(run, "__func__", run)
    # The only function of this module that a task runs as is the wrapper that validates.
    if getattr(run, "__globals__", None) is not vars(celery.app.base):
        return None
    body = inspect.unwrap(run)
    try:  # as Celery reads them
        hints = typing.get_type_hints(body)
    except (NameError, AttributeError, TypeError):
        hints = {n: each.annotation for n, each in inspect.signature(body).parameters.items()}
    models = {name: model for name, hint in hints.items() if (model := _model_of(hint))}

    def validate(given: Mapping[str, object]) -> Mapping[str, object]:
        try:
            return {
                name: models[name].model_validate(value)
                if name in models and value is not None
                else value
                for name, value in given.items()
            }
        except Exception:  # noqa: BLE001  a validator of the model's own may raise anything
            return given  # the task will raise it

    return validate if models else None


def _model_of(hint: Any) -> Any:
    """Return the model of an annotation ``Order`` or ``Order | None``; ``None`` for any other."""
    if typing.get_origin(hint) in (typing.Union, UnionType):
        kinds = [each for each in typing.get_args(hint) if each is not type(None)]
        hint = kinds[0] if len(kinds) == 1 else None
    return hint if isinstance(hint, type) and hasattr(hint, "model_validate") else None


def with_dumped_models(app: Celery, signature: AnySignature) -> AnySignature:
    """Return a call, or a copy of a canvas, with the arguments that its messages will carry."""

    def change(task: AnySignature, _: Place) -> AnySignature:
        # Celery < 5.7 sends models as they are.
        dump = getattr(app.tasks.get(str(task.get("task"))), "_dump_pydantic_arguments", None)
        if dump is None:
            return task
        args, kwargs = dump(task.get("args"), task.get("kwargs"))
        return {**task, "args": args, "kwargs": kwargs}

    changed: AnySignature = with_tasks(signature, change)
    return changed
