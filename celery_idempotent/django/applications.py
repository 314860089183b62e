"""Which Celery app the admin, the checks and the views are about, and what it knows about its tasks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import celery
from celery import _state
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from celery import Celery

#: Names the app, as ``"proj.celery.app"``, or is the app; by default it is the project's.
APP_SETTING = "CELERY_IDEMPOTENT_APP"


def celery_app() -> Celery:
    """Return the app that Django's settings name, else the project's.

    Raises:
        ImproperlyConfigured: if the setting names none.
    """
    return app_of(named_app())


def app_of(found: object) -> Celery:
    """Return the app for what the settings name: an app, its dotted path, or nothing, which is the project's.

    Raises:
        ImproperlyConfigured: if it is none of these.
    """
    if isinstance(found, str):
        try:
            found = import_string(found.replace(":", "."))
        except ImportError as error:
            raise ImproperlyConfigured(f"{APP_SETTING}: {error}") from error
    if found is None:
        found = _current_app()
    if not isinstance(found, celery.Celery):
        raise ImproperlyConfigured(
            f"{APP_SETTING} is a {type(found).__name__}: name a Celery app, such as 'proj.celery.app'."
        )
    return found


def named_app() -> object:
    """Return what the settings name as the app, ``None`` for nothing."""
    found: object = getattr(settings, APP_SETTING, None) or None
    return found


def _current_app() -> Celery:
    """Return Celery's current app, or the only real one.

    An app is the current one only in the thread that made it; a thread of a web server gets a default app without
    settings, unless the project calls ``app.set_default()``.
    """
    state: Any = _state
    default = state.default_app
    # Celery has no other way to ask.
    if state._tls.current_app is None and (default is None or default.main == "default"):  # noqa: SLF001
        apps = [app for app in list(state._get_active_apps()) if app is not default]  # noqa: SLF001
        if len(apps) == 1:
            return apps[0]  # type: ignore[no-any-return]  # untyped
    found: Celery = state.get_current_app()
    return found


def has_app() -> bool:
    """Is there an app, or would Celery have to make a default one?"""
    made = getattr(_state, "_tls", None)
    current = getattr(made, "current_app", None) or getattr(_state, "default_app", None)
    return bool(named_app() or current)
