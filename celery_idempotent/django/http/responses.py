"""Responses of Django, from answers and to what is stored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from typing import NoReturn, ParamSpec

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, HttpResponseBase
from django.utils.duration import duration_iso_string
from django.utils.functional import Promise

from celery_idempotent.http.answers import Answer, Parts, as_text, make_problem
from celery_idempotent.keys.arguments import type_name

Made = ParamSpec("Made")

as_text.register(Promise, str)
as_text.register(timedelta, duration_iso_string)


def response_of(answer: Answer) -> HttpResponse:
    """Return an answer as a response of Django's."""
    headers, status = dict(answer.headers), answer.status
    response = HttpResponse(answer.body, status=status, reason=answer.reason, headers=headers)
    if "Content-Type" not in headers and "content-type" not in map(str.lower, headers):
        del response["Content-Type"]
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
