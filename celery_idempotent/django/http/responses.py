"""Responses of Django, from answers and to what is stored."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from functools import wraps
from typing import Final, ParamSpec, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpResponse, HttpResponseBase

from celery_idempotent.http import answers
from celery_idempotent.http.answers import Answer, make_problem
from celery_idempotent.http.options import HttpOptions
from celery_idempotent.keys.arguments import type_name
from celery_idempotent.records import Stored

T = TypeVar("T")
Made = ParamSpec("Made")

#: Attributes with which a decorator of Django or django-csp tells its middleware what a response may do.
_FOR_MIDDLEWARE: Final = ("xframe_options_exempt", "_csp")


def response_of(answer: Answer) -> HttpResponse:
    """Return an answer as a response of Django's."""
    headers, body = dict(answer.headers), answer.body
    if not isinstance(body, bytes):
        headers.setdefault("Content-Type", "application/json")
        body = json.dumps(body, cls=DjangoJSONEncoder).encode()
    response = HttpResponse(body, status=answer.status, reason=answer.reason, headers=headers)
    if "content-type" not in map(str.lower, headers):
        del response["Content-Type"]
    return response


def _as_response(make: Callable[Made, Answer]) -> Callable[Made, HttpResponse]:
    """Return what ``make`` makes, as a response of Django's."""

    @wraps(make)
    def problem(*args: Made.args, **kwargs: Made.kwargs) -> HttpResponse:
        return response_of(make(*args, **kwargs))

    return problem


problem = _as_response(make_problem)


def pack_response(response: HttpResponseBase, options: HttpOptions, *, name: str) -> Stored:
    """Return the status, the headers that are kept, and the body, or in its place a note that it is not kept."""
    body, why = b"", "it is streamed"
    if isinstance(response, HttpResponse):
        body, why = response.content, ""
    if left := sorted(name for name in vars(response) if name.startswith(_FOR_MIDDLEWARE)):
        # Without it the middleware would send the replay as it should not be.
        why = f"put the decorator that sets {left[0]} above @idempotent_view"
    status, reason = response.status_code, response.reason_phrase
    answer = Answer(status, list(response.headers.items()), body, reason)
    return answers.pack_response(answer, max_bytes=options.max_response_bytes, name=name, why=why)


def awaited(returned: T, name: str) -> T:
    """Return what a function returned that was run, rather than begun.

    Raises:
        ImproperlyConfigured: if it is a coroutine, of which nothing was known when the view was decorated.
    """
    if not inspect.iscoroutine(returned):
        return returned
    returned.close()
    raise ImproperlyConfigured(
        f"{name} returned a coroutine, and looks like no coroutine function. Decorate the coroutine function instead "
        "of what calls it: post() instead of dispatch()."
    )


def returned_response(returned: object, name: str) -> HttpResponseBase:
    """Return what a view returned, if it is a response.

    Raises:
        ImproperlyConfigured: if it is something else, which a framework would have made a response of.
    """
    response = awaited(returned, name)
    if not isinstance(response, HttpResponseBase):
        raise ImproperlyConfigured(
            f"{name} returned a value of type {type_name(response)}, and @idempotent_view stores responses. Put it "
            "around what makes the response: in Django Ninja @decorate_view(idempotent_view(...)), below @api.post."
        )
    return response
