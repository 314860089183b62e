"""The checks of :mod:`celery_idempotent.checks` among Django's own; with ``--deploy`` also those that ask servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from django.core import checks
from django.core.exceptions import ImproperlyConfigured

from celery_idempotent.celery.checks import Finding, check_settings, check_store
from celery_idempotent.django.applications import celery_app

if TYPE_CHECKING:
    from celery import Celery

#: ``manage.py check --tag idempotency``
TAG = "idempotency"

_KINDS = {"error": checks.Error, "warning": checks.Warning}


@checks.register(TAG)
def of_settings(**_: object) -> list[checks.CheckMessage]:
    """Import all tasks, as a worker does, and check them and the settings, without asking a server."""
    return _messages(check_settings)


@checks.register(TAG, deploy=True)
def of_store(**_: object) -> list[checks.CheckMessage]:
    """Check the store and its servers."""
    return _messages(check_store)


def _messages(look: Callable[[Celery], Iterable[Finding]]) -> list[checks.CheckMessage]:
    try:
        found = look(celery_app())
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="celery_idempotent.E012")]
    return [
        _KINDS[each.level](each.problem, hint=each.hint, id=f"celery_idempotent.{each.id}")
        for each in found
    ]
