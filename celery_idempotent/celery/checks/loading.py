"""The tasks that checks are about: all that a worker would have, and not only those that happen to be imported."""

from __future__ import annotations

import os
import weakref
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["have_tasks", "load_tasks"]

#: Whose tasks are imported, or are being imported.
_loaded: weakref.WeakSet[Celery] = weakref.WeakSet()

#: With this set, Celery does not have Django check itself before it imports tasks: we may be one of those checks.
_SKIP = "CELERY_SKIP_CHECKS"


def load_tasks(app: Celery) -> None:
    """Import the modules with the app's tasks, as a worker does, once: other processes know only those that they use.

    Raises whatever one of these modules raises.
    """
    if app in _loaded:
        return
    _loaded.add(app)  # already now: the modules may ask for checks themselves
    skip = os.environ.get(_SKIP)
    os.environ[_SKIP] = "1"
    try:
        loader: Any = app.loader
        loader.import_default_modules()
    except BaseException:
        _loaded.discard(app)
        raise
    finally:
        if skip is None:
            os.environ.pop(_SKIP, None)
        else:
            os.environ[_SKIP] = skip


def have_tasks(app: Celery) -> None:
    """Note that a worker has imported the app's tasks."""
    _loaded.add(app)
