"""Responses of Django, to and from what is stored."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Final, ParamSpec, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder
from django.http import HttpResponse, HttpResponseBase, JsonResponse

from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.http import responses
from celery_idempotent.http.problems import Problem, RequestRefused, make_problem
from celery_idempotent.keys.arguments import type_name
from celery_idempotent.records import Stored

if TYPE_CHECKING:
    from celery_idempotent.django.http.options import HttpOptions

T = TypeVar("T")
Made = ParamSpec("Made")

#: Attributes with which a decorator of Django or django-csp tells its middleware what a response may do.
_FOR_MIDDLEWARE: Final = ("xframe_options_exempt", "_csp")


def awaited(response: T, name: str) -> T:
    """Return the response of a view that was run, rather than begun.

    Raises:
        ImproperlyConfigured: if it is a coroutine, of which nothing was known when the view was decorated.
    """
    if not inspect.iscoroutine(response):
        return response
    response.close()
    raise ImproperlyConfigured(
        f"{name} returned a coroutine, and looks like no coroutine function. Decorate the coroutine function instead "
        "of what calls it: post() instead of dispatch()."
    )


def response_of(returned: object, name: str) -> HttpResponseBase:
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


def pack_response(response: HttpResponseBase, options: HttpOptions, *, name: str) -> Stored:
    """Return the status, the headers that are kept, and the body, or in its place a note that it is not kept."""
    body, why = b"", "it is streamed"
    if isinstance(response, HttpResponse):
        body, why = response.content, ""
    if left := sorted(name for name in vars(response) if name.startswith(_FOR_MIDDLEWARE)):
        # Without it the middleware would send the replay as it should not be.
        why = f"put the decorator that sets {left[0]} above @idempotent_view"
    return responses.pack_response(
        response.status_code,
        response.reason_phrase,
        response.headers.items(),
        body,
        max_bytes=options.max_response_bytes,
        name=name,
        why=why,
    )


def read_response(stored: Stored) -> HttpResponse:
    """Return the response that was kept, marked as a replay.

    Raises:
        ResultUnavailable: if its body was not kept, or it cannot be read.
    """
    status, reason, headers, body = responses.read_response(stored)
    try:
        response = HttpResponse(body, status=status, reason=reason, headers=dict(headers))
    except Exception as error:  # noqa: BLE001  whatever Django says of what is no response
        trouble = f"What is stored for this key cannot be read ({type(error).__name__})."
        raise ResultUnavailable(trouble) from None
    if "content-type" not in (name.lower() for name, _ in headers):
        del response["Content-Type"]
    return response


def _answering(make: Callable[Made, Problem]) -> Callable[Made, HttpResponse]:
    """Return what ``make`` makes, as a response of Django's."""

    @wraps(make)
    def problem(*args: Made.args, **kwargs: Made.kwargs) -> HttpResponse:
        return _response_of(make(*args, **kwargs))

    return problem


problem = _answering(make_problem)


def refusal(refused: RequestRefused, options: HttpOptions) -> HttpResponse:
    """Return the answer to a request that is not carried out."""
    return _response_of(refused.problem(options.docs_url))


def _response_of(said: Problem) -> HttpResponse:
    response = JsonResponse(said.body, status=said.status, encoder=DjangoJSONEncoder)
    for name, value in said.headers.items():
        response[name] = value
    return response
