"""The registry: which idempotent tasks an app has, and to which of them the records of a namespace belong."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import Definition

#: The apps whose task modules are imported, or are being imported.
loaded: weakref.WeakSet[Celery] = weakref.WeakSet()

#: With this set, Celery does not have Django check itself before it imports tasks: we may be one of those checks.
_SKIP = "CELERY_SKIP_CHECKS"


def definitions(app: Celery) -> list[Definition]:
    """Return those of the app's idempotent tasks; tasks that are switched off are among them."""
    found = [getattr(task, "_definition", None) for task in list(app.tasks.values())]
    return [each for each in found if each is not None]


def definition_of(app: Celery, namespace: str, *, load: bool = False) -> Definition | None:
    """Return the definition of the task that the records of a namespace belong to, also if it is switched off.

    ``None``: they are a view's, or those of another app. ``load``: import the app's tasks if it is
    none of those that this process knows already.
    """
    for each in definitions(app):
        if each.identifier.namespace == namespace:
            return each
    if not load:
        return None
    load_tasks(app)
    return definition_of(app, namespace)


def may_guard(app: Celery, name: str) -> bool:
    """May this be an idempotent task? Of those that this app does not know, some are if some of its own are."""
    if name not in app.tasks:
        return any(each.policy.mode != "off" for each in definitions(app))
    find = getattr(app.tasks[name], "idempotency_definition", None)
    return find is not None and find() is not None


def namespaces(app: Celery) -> list[str]:
    """Return the namespaces of all the tasks that a worker of this app would have."""
    load_tasks(app)
    return sorted({each.identifier.namespace for each in definitions(app)})


def load_tasks(app: Celery) -> None:
    """Import the modules with the app's tasks, as a worker does, once: other processes know only those that they use.

    Raises whatever one of these modules raises.
    """
    if app in loaded:
        return
    loaded.add(app)  # already now: the modules may ask for tasks themselves
    before = os.environ.get(_SKIP, "")
    os.environ[_SKIP] = "1"
    try:
        app.loader.import_default_modules()
    except BaseException:
        loaded.discard(app)
        raise
    finally:
        os.environ[_SKIP] = before
