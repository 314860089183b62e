"""Which settings something was made of, so that it can be made anew once they are others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["Snapshot", "loaded"]


class Snapshot:
    """Some settings of an app, as far as they are set in its process: ``app.conf.name = value``, ``update()``.

    What else settings come from is read once, with the configuration object.
    """

    __slots__ = ("_conf", "_keys", "_set", "_size")

    def __init__(self, app: Celery, names: Iterable[str]) -> None:
        self._conf = conf = loaded(app)
        self._keys = [conf._key(key) for name in names for key in conf._to_keys(name)]  # noqa: SLF001  the only way to ask
        self._size = len(conf.changes)
        self._set = self._look()

    def holds(self, app: Celery) -> bool:
        """Is it all as it was? Asked for every call, so it costs next to nothing."""
        conf: Any = app.conf
        if conf is not self._conf:
            return False
        if len(conf.changes) != self._size:
            if self._look() != self._set:
                return False
            self._size = len(conf.changes)
        get = conf.changes.get
        return all(get(key) == value for key, value in self._set)

    def _look(self) -> list[tuple[str, object]]:
        changes = self._conf.changes
        return [(key, changes[key]) for key in self._keys if key in changes]


def loaded(app: Celery) -> Any:
    """Return the app's settings: until one is read, ``app.conf`` is an object that knows none."""
    app.conf.get("task_acks_late")
    return app.conf
