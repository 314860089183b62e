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


def loaded(app: Celery) -> Any:
    """Return the app's settings; until one is read, ``app.conf`` is an empty placeholder."""
    app.conf.get("task_acks_late")
    return app.conf


def own_settings(app: Celery) -> list[str]:
    """Return the names of the settings with our prefix, without it, in whatever form the user set them."""
    conf = loaded(app)
    prefix = (getattr(conf, "prefix", None) or "").lower()
    names = [str(name) for mapping in _set_by_user(conf) for name in list(mapping.keys())]
    if prefix:
        names += [n.lower().removeprefix(prefix) for n in names if n.lower().startswith(prefix)]
    return [name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)]


def is_explicit(app: Celery, name: str) -> bool:
    """Did the user set ``name``, under any spelling that Celery knows, or does it have Celery's default?"""
    from celery.utils.collections import ConfigurationView

    conf = loaded(app)
    spellings, prefix = getattr(conf, "_keys", None), getattr(conf, "prefix", None)
    # Celery's own value_set_for() knows all spellings only from 5.7 on.
    user = ConfigurationView({}, _set_by_user(conf), spellings, prefix)
    return user.get(name, user) is not user


def _set_by_user(conf: object) -> Any:
    """Return all layers of the settings but the last, which holds Celery's defaults."""
    return list(getattr(conf, "maps", ()))[:-1]
