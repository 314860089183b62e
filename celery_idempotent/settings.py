"""Reads settings: durations, and snapshots that show when what was made from settings has to be made again.

::

    app.conf.idempotency_lease = 30     the definition of each task is made anew at its next use
    app.conf.idempotency_store = …      so is the store of the app; runs at work go on with theirs
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery


def real_app(app: Celery) -> Celery:
    """Return the app that a proxy stands for, such as ``current_app``, or ``app`` of a shared task."""
    current = getattr(app, "_get_current_object", None)
    return app if current is None else current()


class Snapshot:
    """The values of some settings that were changed in this process: ``app.conf.name = value``, ``app.conf.update()``.

    Only these can change later. Configuration modules and defaults are read once.
    """

    __slots__ = ("_conf", "_keys", "_set", "_size")

    def __init__(self, app: Celery, names: Iterable[str]) -> None:
        self._conf = conf = loaded(app)
        self._keys = [conf._key(key) for name in names for key in conf._to_keys(name)]  # noqa: SLF001  the only way to ask
        self._size = len(conf.changes)
        self._set = self._look()

    def holds(self, app: Celery) -> bool:
        """Are all values as they were? This is asked for every call of a task, so it has to be cheap."""
        conf = app.conf
        if conf is not self._conf:
            return False
        if len(conf.changes) != self._size:
            if self._look() != self._set:
                return False
            self._size = len(conf.changes)
        unchanged: bool = self._set.items() <= conf.changes.items()
        return unchanged

    def _look(self) -> dict[str, object]:
        changes = self._conf.changes
        return {key: changes[key] for key in self._keys if key in changes}


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
