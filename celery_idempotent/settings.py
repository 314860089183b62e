"""Reads settings: the app behind a proxy, its loaded configuration, and durations."""

from __future__ import annotations

import math
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery


def real_app(app: Celery) -> Celery:
    """Return the app that a proxy stands for, such as ``current_app``, or ``app`` of a shared task."""
    current = getattr(app, "_get_current_object", None)
    return app if current is None else current()


def loaded(app: Celery) -> Any:
    """Return the app's settings, loaded: until one is read, ``app.conf`` is an empty placeholder."""
    app.conf.get("task_acks_late")
    return app.conf


def milliseconds(value: object) -> int:
    """Return a duration, given as seconds or timedelta, in whole milliseconds, never rounded down to nothing.

    Raises:
        ValueError: saying what is allowed.
    """
    if isinstance(value, timedelta):
        seconds = value.total_seconds()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        seconds = float(value)
    else:
        raise ValueError("must be seconds or a timedelta")
    if not math.isfinite(seconds) or seconds < 0 or seconds > 10 * 365 * 86_400:
        raise ValueError("must be a time between 0 and ten years")
    return math.ceil(seconds * 1000)
