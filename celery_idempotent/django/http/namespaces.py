"""What the keys of guarded views are for, as far as this process knows: for those who look for a record."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_idempotent.django.http.options import http_options

__all__ = ["note", "view_namespaces"]

#: As the views were given them; ``None``: what the setting says.
_given: set[str | None] = set()


def note(given: Mapping[str, Any]) -> None:
    """Remember the namespace of a view with these options of its own."""
    _given.add(given.get("namespace"))


def view_namespaces() -> list[str]:
    """Return the namespaces of all views that were guarded so far; none in a project that guards none."""
    return sorted({name or http_options().namespace for name in _given})
