"""Responses of Django, from answers and to what is stored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import NoReturn, ParamSpec

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpResponse, HttpResponseBase

from celery_idempotent.http import answers
from celery_idempotent.http.answers import Answer, make_problem
from celery_idempotent.keys.arguments import type_name
from celery_idempotent.records import Stored

Made = ParamSpec("Made")


def response_of(answer: Answer) -> HttpResponse:
    """Return an answer as a response of Django's."""
    headers, body = answer.encoded(DjangoJSONEncoder)
    response = HttpResponse(body, status=answer.status, reason=answer.reason, headers=headers)
    if "Content-Type" not in headers and "content-type" not in map(str.lower, headers):
        del response["Content-Type"]
    return response


def _as_response(make: Callable[Made, Answer]) -> Callable[Made, HttpResponse]:
    return wraps(make)(lambda *args, **kwargs: response_of(make(*args, **kwargs)))


problem = _as_response(make_problem)


def pack_response(response: HttpResponseBase, *, max_bytes: int, name: str) -> Stored:
    """Return the status, the headers that are kept, and the body, or in its place a note that it is not kept."""
    body, why = b"", "it is streamed"
    if isinstance(response, HttpResponse):
        body, why = response.content, ""
    head = response.status_code, response.reason_phrase, response.headers.items()
    return answers.pack_response(*head, body, max_bytes=max_bytes, name=name, why=why)


def refuse_returned(returned: object, name: str) -> NoReturn:
    """Refuse what a view returned, which is no response."""
    if inspect.iscoroutine(returned):
        returned.close()
    raise ImproperlyConfigured(
        f"{name} returned a value of type {type_name(returned)}, not a response. Decorate the function that makes the "
        "response: the coroutine function (post(), not dispatch(), which calls it), or in Django Ninja the operation: "
        "@decorate_view(idempotent_view(...)), below @api.post."
    )
