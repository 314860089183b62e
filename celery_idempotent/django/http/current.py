"""Which Celery app the pages and views work with."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from celery import current_app
from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["celery_app"]


def celery_app(path: str | None = None) -> Celery:
    """Return the app at the dotted ``path``, else the project's.

    An app is Celery's current one only in the thread that made it; a thread of a web server gets a default app with
    nobody's settings, unless the project calls ``app.set_default()``. Where there is just one real app, it is meant.
    """
    if path is not None:
        found: Celery = import_string(path)
        return found
    state: Any = import_module("celery._state")
    if state._tls.current_app is None:  # noqa: SLF001  Celery has no other way to ask
        apps = [app for app in list(state._get_active_apps()) if app is not state.default_app]  # noqa: SLF001
        if (state.default_app is None or state.default_app.main == "default") and len(apps) == 1:
            return apps[0]  # type: ignore[no-any-return]  # untyped
    app: Celery = current_app._get_current_object()  # type: ignore[attr-defined]  # noqa: SLF001  a proxy
    return app
