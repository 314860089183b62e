"""What this process knows of its decorated views: their options and guards, and what their records are found by."""

from __future__ import annotations

import threading

from django.core.signals import setting_changed

from celery_idempotent.django.applications import APP_SETTING
from celery_idempotent.django.http.guards import Guard
from celery_idempotent.django.http.options import (
    HTTP_SETTING,
    HttpOptions,
    ShowErrors,
    http_options,
)

#: The guarded views by name, with the namespaces that they were given; ``None``: what the setting says. Views that one
#: function makes have one name.
_guarded: dict[str, str | None] = {}
_namespaces: set[str | None] = set()

#: What views say about the errors of their tasks, from the least to the most.
_LEAST_FIRST: tuple[ShowErrors, ...] = ("none", "permanent", "all")
_shown: set[ShowErrors] = set()


class Marks:
    """One decorated view: its options, and whether it runs in the request."""

    def __init__(self, name: str, given: dict[str, object], *, guards: bool) -> None:
        self.name = name
        self.guards = guards
        self._given = given
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        # What does not depend on settings is checked now, with the view.
        options = http_options(given)
        if "show_errors" in given:
            _shown.add(options.show_errors)
        if guards:
            _guarded[name] = options.namespace if "namespace" in given else None
            _namespaces.add(_guarded[name])
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
    """Return the namespaces of all views that were guarded so far; none in a project that guards none."""
    return sorted({name or http_options().namespace for name in _namespaces})


def namespace_of_view(name: str) -> str | None:
    """Return the namespace of the records of a guarded view, by its name; ``None`` if no view has it."""
    return (_guarded[name] or http_options().namespace) if name in _guarded else None


def least_shown(show_errors: ShowErrors) -> ShowErrors:
    """Return what may be said where it is not known by which view a task was queued: what every view would say."""
    return min((show_errors, *_shown), key=_LEAST_FIRST.index)
