"""A view for load balancers and orchestrators: is all well right now?

``path("health/idempotency/", health)``. It needs no login, and says nothing about keys, tasks or callers.
"""

from __future__ import annotations

from django.http import HttpRequest, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from celery_idempotent.celery.story import check_health
from celery_idempotent.django.applications import celery_app
from celery_idempotent.stores import get_store


@never_cache
@require_safe
def health(request: HttpRequest) -> JsonResponse:  # noqa: ARG001  any request gets the same answer
    """Answer 200 if all is well, else 503, with the fields of ``celery idempotency check --health --json``."""
    store = get_store(app := celery_app())
    found = check_health(app, store, store.health())
    return JsonResponse(found, status=200 if found["well"] else 503)
