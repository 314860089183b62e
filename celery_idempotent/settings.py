"""Reads settings: the app behind a proxy, and what its user has configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from celery import Celery

#: Of our settings and of a task's options.
PREFIX: Final = "idempotency_"


def real_app(app: Celery) -> Celery:
    """Return the app that a proxy stands for, such as ``current_app``, or ``app`` of a shared task."""
    current = getattr(app, "_get_current_object", None)
    return app if current is None else current()


def own_settings(app: Celery) -> list[str]:
    """Return the names of the settings with our prefix, without it, in whatever form the user set them."""
    names = [str(name) for mapping in _set_by_user(app) for name in list(mapping.keys())]
    prefix = (getattr(app.conf, "prefix", None) or "").lower()
    if prefix:
        names += [n.lower().removeprefix(prefix) for n in names if n.lower().startswith(prefix)]
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]


def is_explicit(app: Celery, name: str) -> bool:
    """Did the user set ``name``, under any spelling that Celery knows, or does it have Celery's default?"""
    from celery.utils.collections import ConfigurationView

    user, conf = _set_by_user(app), app.conf
    # Celery's own value_set_for() knows all spellings only from 5.7 on.
    spellings, prefix = getattr(conf, "_keys", None), getattr(conf, "prefix", None)
    user = ConfigurationView({}, user, spellings, prefix)
    return user.get(name, user) is not user


def _set_by_user(app: Celery) -> Any:
    """Return all layers of the settings but the last, which holds Celery's defaults."""
    app.conf.get("task_acks_late")  # until one is read, app.conf is an empty placeholder
    return list(getattr(app.conf, "maps", ()))[:-1]
