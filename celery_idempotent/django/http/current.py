"""Which Celery app the views work with."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.utils.module_loading import import_string

from celery_idempotent.django import applications

if TYPE_CHECKING:
    from celery import Celery

__all__ = ["celery_app"]


def celery_app(path: str | None = None) -> Celery:
    """Return the app at the dotted ``path``, else the one that the admin works with, too."""
    if path is not None:
        found: Celery = import_string(path.replace(":", "."))
        return found
    return applications.celery_app()
