"""The status resource: where an operation is, as JSON, and only for its caller."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from django.urls import NoReverseMatch, reverse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.views.decorators.http import require_safe

from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import caller_scope, http_options
from celery_idempotent.django.http.responses import response_of
from celery_idempotent.http.status import status_answer

if TYPE_CHECKING:
    from django.http import HttpRequest, HttpResponseBase


def status_url(namespace: str, key: str) -> str | None:
    """Return the path of the status of a key; ``None``: no path can have this key, or there is no status resource."""
    try:
        return reverse("celery_idempotent_http:status", args=(namespace, key))
    except NoReverseMatch:
        return None


@require_safe
def status(request: HttpRequest, namespace: str, key: str) -> HttpResponseBase:
    """Show the status of a key of the caller; ``request`` may be one of Django REST framework, with its own user."""
    options = http_options()
    caller = partial(caller_scope, request, options)
    response = response_of(status_answer(celery_app(), namespace, key, caller, options.docs_url))
    patch_vary_headers(response, ("Authorization", "Cookie"))
    plain: HttpRequest = getattr(request, "_request", request)
    found = get_conditional_response(plain, etag=response.get("ETag"), response=response)
    assert found is not None, "there was a response"
    return found
