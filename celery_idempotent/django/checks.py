"""The checks of :mod:`celery_idempotent.checks` among Django's own; with ``--deploy`` also those that ask servers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.db import connections
from django.urls import get_resolver

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


@checks.register(TAG)
def of_views(**_: object) -> list[checks.CheckMessage]:
    """Find guarded views that ATOMIC_REQUESTS runs in a transaction: each of their requests is refused."""
    atomic = {name for name, each in connections.settings.items() if each["ATOMIC_REQUESTS"]}
    views = _views(get_resolver()) if atomic and hasattr(settings, "ROOT_URLCONF") else ()
    names = {name for name, view in views if atomic - getattr(view, "_non_atomic_requests", set())}
    return [
        checks.Warning(
            f"ATOMIC_REQUESTS runs {name} in a transaction, where @idempotent_view refuses each request.",
            hint="Put @transaction.non_atomic_requests above @idempotent_view, as docs/http.md says.",
            id="celery_idempotent.W028",
        )
        for name in sorted(names)
    ]


def _views(resolver: Any) -> Iterator[tuple[str, Any]]:
    """Return the guarded views by name; of Django Ninja and ``@api_view`` none is known before its first request."""
    for each in resolver.url_patterns:
        if hasattr(each, "url_patterns"):
            yield from _views(each)
            continue
        view = each.callback
        named = getattr(view, "view_class", getattr(view, "cls", view))
        parts = [part for base in getattr(named, "__mro__", ()) for part in vars(base).values()]
        if any(getattr(part, "refuses_transactions", False) for part in (view, *parts)):
            yield f"{named.__module__}.{named.__qualname__}", view


def _messages(look: Callable[[Celery], Iterable[Finding]]) -> list[checks.CheckMessage]:
    try:
        found = look(celery_app())
    except ImproperlyConfigured as error:
        return [checks.Error(str(error), id="celery_idempotent.E012")]
    return [
        _KINDS[each.level](each.problem, hint=each.hint, id=f"celery_idempotent.{each.id}")
        for each in found
    ]
