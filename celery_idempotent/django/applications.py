"""The Celery app that the admin, the checks and the views use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import celery
from celery import _state
from django.conf import settings
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

if TYPE_CHECKING:
    from celery import Celery

#: The setting with the app, or its path (``"proj.celery.app"``); by default it is the project's.
APP_SETTING = "CELERY_IDEMPOTENT_APP"

_STATE: Any = _state


def celery_app() -> Celery:
    """Return the app that Django's settings name, else the project's.

    Raises:
        ImproperlyConfigured: if the setting does not name an app.
    """
    found = getattr(settings, APP_SETTING, None) or _current_app()
    if isinstance(found, str):
        try:
            found = import_string(found.replace(":", "."))
        except ImportError as error:
            raise ImproperlyConfigured(f"{APP_SETTING}: {error}") from error
    if not isinstance(found, celery.Celery):
        raise ImproperlyConfigured(
            f"{APP_SETTING} is a {type(found).__name__}: name a Celery app, such as 'proj.celery.app'."
        )
    return found


def _current_app() -> Celery:
    """Return Celery's current app, or the only real one.

    An app is the current one only in the thread that made it; a thread of a web server gets a default app without
    settings, unless the project calls ``app.set_default()``.
    """
    default = _STATE.default_app
    # Celery has no other way to ask.
    is_unknown = _STATE._tls.current_app is None  # noqa: SLF001
    if is_unknown and (default is None or default.main == "default"):
        apps = [app for app in list(_STATE._get_active_apps()) if app is not default]  # noqa: SLF001
        if len(apps) == 1:
            return apps[0]  # type: ignore[no-any-return]  # untyped
    found: Celery = _STATE.get_current_app()
    return found
