"""The registry: which idempotent tasks an app has, and to which of them the records of a namespace belong."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import DefinedTask, Definition

#: The apps whose task modules are imported, or are being imported.
_loaded: weakref.WeakSet[Celery] = weakref.WeakSet()

#: With this set, Celery does not have Django check itself before it imports tasks: we may be one of those checks.
_SKIP = "CELERY_SKIP_CHECKS"


def idempotent_tasks(app: Celery) -> Iterator[tuple[DefinedTask, Definition]]:
    """Yield the app's idempotent tasks with their definitions; those that are switched off are among them."""
    for task in list(app.tasks.values()):
        definition: Definition | None = getattr(task, "_definition", None)
        if definition is not None:
            yield task, definition  # type: ignore[misc]  # only a DefinedTask has a definition


def has_tasks(app: Celery) -> bool:
    """Has this app any idempotent task, be it switched off?"""
    return any(idempotent_tasks(app))


def has_active_tasks(app: Celery) -> bool:
    """Has this app any idempotent task that is not switched off?"""
    return any(task.idempotency_definition() for task, _ in idempotent_tasks(app))


def is_other_task(app: Celery, name: str) -> bool:
    """Is this a task that the app knows, and knows not to be idempotent, or to be switched off?"""
    task = app.tasks.get(name)
    if task is None:
        return False
    definition = getattr(task, "idempotency_definition", None)
    return definition is None or definition() is None


def namespaces(app: Celery) -> list[str]:
    """Return the namespaces of all the tasks that a worker of this app would have."""
    load_tasks(app)
    return sorted({definition.identifier.namespace for _, definition in idempotent_tasks(app)})


def find_task(app: Celery, namespace: str, *, load: bool = False) -> DefinedTask | None:
    """Return the task that the records of a namespace belong to, ``None`` if no task of this process has it.

    ``load``: import the app's tasks if it is none of those that this process knows already.
    """
    found = _find(app, namespace, load=load)
    return None if found is None else found[0]


def definition_of(app: Celery, namespace: str, *, load: bool = False) -> Definition | None:
    """Return the definition of the task that :func:`find_task` finds, also if it is switched off."""
    found = _find(app, namespace, load=load)
    return None if found is None else found[1]


def _find(app: Celery, namespace: str, *, load: bool) -> tuple[DefinedTask, Definition] | None:
    for task, definition in idempotent_tasks(app):
        if definition.identifier.namespace == namespace:
            return task, definition
    if not load:
        return None
    load_tasks(app)
    return _find(app, namespace, load=False)


def load_tasks(app: Celery) -> None:
    """Import the modules with the app's tasks, as a worker does, once: other processes know only those that they use.

    Raises whatever one of these modules raises.
    """
    if app in _loaded:
        return
    _loaded.add(app)  # already now: the modules may ask for tasks themselves
    skip = os.environ.get(_SKIP)
    os.environ[_SKIP] = "1"
    try:
        app.loader.import_default_modules()
    except BaseException:
        _loaded.discard(app)
        raise
    finally:
        if skip is None:
            os.environ.pop(_SKIP, None)
        else:
            os.environ[_SKIP] = skip


def has_loaded_tasks(app: Celery) -> None:
    """Note that a worker has imported the app's tasks."""
    _loaded.add(app)
