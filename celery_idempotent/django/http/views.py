"""What this process knows of its decorated views: their options and guards."""

from __future__ import annotations

import threading

from django.core.signals import setting_changed

from celery_idempotent.django.applications import APP_SETTING
from celery_idempotent.django.http.guards import Guard
from celery_idempotent.django.http.options import (
    HTTP_NAMESPACE,
    HTTP_SETTING,
    HttpOptions,
    http_options,
)

#: The views with ``@idempotent_view``.
_guarded: set[str] = set()


class Marks:
    """One decorated view: its options, and whether it runs in the request."""

    def __init__(self, name: str, given: dict[str, object], *, guards: bool) -> None:
        self.name = name
        self.guards = guards
        self._given = given
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        http_options(given)  # a bad option is refused with the view
        if guards:
            _guarded.add(name)
        setting_changed.connect(self._forget)

    def _forget(self, *, setting: str = "", **_: object) -> None:
        if setting in (HTTP_SETTING, APP_SETTING):
            self._guard = None

    @property
    def guard(self) -> Guard:
        """What guards the view, under the settings that hold."""
        guard = self._guard
        if guard is None:
            with self._lock:
                guard = self._guard = Guard(self.name, self, http_options(self._given))
        return guard

    @property
    def options(self) -> HttpOptions:
        """The options of the view."""
        return self.guard.options


def view_namespaces() -> list[str]:
    """Return the namespace of guarded views; none in a project that guards none."""
    return [HTTP_NAMESPACE] if _guarded else []
