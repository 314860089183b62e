"""Responses of Django: from answers, to what is stored, and the status resource, only for its caller."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import partial, wraps
from typing import TYPE_CHECKING, NoReturn, ParamSpec

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, HttpResponseBase
from django.urls import NoReverseMatch, reverse
from django.utils.cache import get_conditional_response, patch_vary_headers
from django.utils.duration import duration_iso_string
from django.utils.functional import Promise
from django.views.decorators.http import require_safe

from celery_idempotent.django.applications import celery_app
from celery_idempotent.django.http.requests import caller_scope, http_options
from celery_idempotent.http.answers import Answer, Parts, as_text, make_problem
from celery_idempotent.http.status import status_answer
from celery_idempotent.keys.arguments import type_name

if TYPE_CHECKING:
    from django.http import HttpRequest

Made = ParamSpec("Made")

as_text.register(Promise, str)
as_text.register(timedelta, duration_iso_string)


def response_of(answer: Answer) -> HttpResponse:
    """Return an answer as a response of Django's."""
    headers, status = dict(answer.headers), answer.status
    kind = headers.pop("Content-Type", None)
    response = HttpResponse(answer.body, kind or "", status, answer.reason)
    if kind is None:
        del response.headers["Content-Type"]
    for name, value in headers.items():
        response.headers[name] = value
    return response


def _as_response(make: Callable[Made, Answer]) -> Callable[Made, HttpResponse]:
    return wraps(make)(lambda *args, **kwargs: response_of(make(*args, **kwargs)))


problem = _as_response(make_problem)


def parts_of(response: HttpResponseBase) -> Parts:
    """Return the parts of a response that may be stored."""
    body, why = b"", "it is streamed"
    if isinstance(response, HttpResponse):
        body, why = response.content, ""
    headers = response.headers
    named = [(name, headers[name]) for name in headers]  # items() takes twice as long
    return response.status_code, response.reason_phrase, named, body, why


def refuse_returned(returned: object, name: str) -> NoReturn:
    """Refuse what a view returned, which is no response."""
    if inspect.iscoroutine(returned):
        returned.close()
    raise ImproperlyConfigured(
        f"{name} returned a value of type {type_name(returned)}, not a response. Decorate the function that makes the "
        "response: the coroutine function (post(), not dispatch(), which calls it), or in Django Ninja the operation: "
        "@decorate_view(idempotent_view(...)), below @api.post."
    )


# -- the status resource -----------------------------------------------------------------------------------------------


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
