"""The checks of :mod:`celery_idempotent.checks` among Django's own; those that ask servers with ``check --deploy``."""

from __future__ import annotations

from collections.abc import Iterable

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from celery_idempotent.celery.checks import Finding, check_settings, check_store
from celery_idempotent.django.applications import celery_app, has_app

#: ``manage.py check --tag idempotency``
TAG = "idempotency"


@checks.register(TAG)
def of_settings(**_: object) -> list[checks.CheckMessage]:
    """Import all tasks, as a worker does, and look at them and at the settings: commands shall not wait for servers."""
    if not has_app():
        return []
    try:
        return _messages(check_settings(celery_app()))
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="celery_idempotent.E012")]


@checks.register(TAG, deploy=True)
def of_store(**_: object) -> list[checks.CheckMessage]:
    """Ask the store, too."""
    if not has_app():
        return []
    try:
        app = celery_app()
    except ImproperlyConfigured:
        return []  # said above
    return _messages(check_store(app))


def _messages(found: Iterable[Finding]) -> list[checks.CheckMessage]:
    kinds = {"error": checks.Error, "warning": checks.Warning}
    return [
        kinds[each.level](each.problem, hint=each.hint, id=f"celery_idempotent.{each.id}")
        for each in found
    ]
