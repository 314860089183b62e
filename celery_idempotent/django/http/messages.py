"""A response as it is kept: an HTTP message in the record, and back to the bytes that the first caller got.

::

    HTTP/1.1 201 Created
    Content-Type: application/json
    Location: /payments/17/

    {"id": 17}
"""

from __future__ import annotations

import inspect
import logging
from typing import Final, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.http import HttpResponse, HttpResponseBase

from celery_idempotent.django.http.options import HttpOptions
from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.keys.arguments import type_name
from celery_idempotent.records import Stored

logger = logging.getLogger(__name__)

T = TypeVar("T")

CONTENT_TYPE: Final = "application/http"
#: Headers of a response that a replay does not have, lower case. All others are stored with it.
NEVER_KEPT: Final = frozenset(
    (
        # They belong to one answer or one caller's login:
        *("age", "authentication-info", "date", "set-cookie", "www-authenticate"),
        # to one connection (RFC 9110, 7.6.1):
        *("connection", "content-length", "keep-alive", "proxy-authenticate", "proxy-connection"),
        *("proxy-authentication-info", "te", "trailer", "transfer-encoding", "upgrade", "via"),
        # and to one trace.
        *("b3", "server-timing", "traceparent", "tracestate", "traceresponse", "uber-trace-id"),
        *(
            "x-amzn-trace-id",
            "x-b3-sampled",
            "x-b3-spanid",
            "x-b3-traceid",
            "x-cloud-trace-context",
        ),
        *("x-correlation-id", "x-request-id"),
    )
)
#: Tells a replay from the first answer.
REPLAYED: Final = "Idempotent-Replayed"
#: Attributes with which a decorator of Django or django-csp tells its middleware what a response may do.
_FOR_MIDDLEWARE: Final = ("xframe_options_exempt", "_csp")
#: In the record only: the response was sent whole, and its body is not kept.
_NOT_KEPT: Final = "Idempotent-Body-Not-Kept"
_NOT_FROM_VIEW: Final = NEVER_KEPT | {each.lower() for each in (REPLAYED, _NOT_KEPT)}
_MAX_HEAD: Final = 32 * 1024


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
    body, why = (
        (response.content, "") if isinstance(response, HttpResponse) else (b"", "it is streamed")
    )
    if len(body) > options.max_response_bytes:
        body, why = b"", f"it has {len(body)} bytes"
    if left := sorted(name for name in vars(response) if name.startswith(_FOR_MIDDLEWARE)):
        # Without it the middleware would send the replay as it should not be.
        body, why = b"", f"put the decorator that sets {left[0]} above @idempotent_view"
    lines = [f"HTTP/1.1 {response.status_code} {_ascii(response.reason_phrase)}"]
    if why:
        logger.warning(
            "idempotency: the response of %s is not kept (%s): a repetition is told so", name, why
        )
        lines.append(f"{_NOT_KEPT}: {why}")
    lines += [
        f"{key}: {value}"
        for key, value in response.headers.items()
        if key.lower() not in _NOT_FROM_VIEW
    ]
    head = "\r\n".join(lines).encode("latin-1", "replace")
    if len(head) > _MAX_HEAD:
        raise ValueError(f"the headers of the response of {name} have more than {_MAX_HEAD} bytes")
    return Stored(
        content_type=CONTENT_TYPE,
        content_encoding="binary",
        body=head + b"\r\n\r\n" + body,
    )


def read_response(stored: Stored) -> HttpResponse:
    """Return the response that was kept, marked as a replay.

    Raises:
        ResultUnavailable: if its body was not kept, or it cannot be read.
    """
    if stored.content_type != CONTENT_TYPE:
        raise ResultUnavailable("What is stored for this key is no response.")
    try:
        return _parse(stored)
    except ResultUnavailable:
        raise
    except Exception as error:  # noqa: BLE001  whatever Django says of what is no response
        problem = f"What is stored for this key cannot be read ({type(error).__name__})."
        raise ResultUnavailable(problem) from None


def _parse(stored: Stored) -> HttpResponse:
    """Return the response of a record, as the first caller got it, with the mark of a replay.

    Raises:
        ResultUnavailable: if the response was too large, or could not be kept for another reason.
    """
    head, _, body = stored.body.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    _, status, reason = first.split(" ", 2)
    if why := headers.get(_NOT_KEPT):
        raise ResultUnavailable(
            f"The request was carried out and answered with {status}; the response was not kept: {why}."
        )
    headers[REPLAYED] = "true"
    response = HttpResponse(body, status=int(status), reason=reason, headers=headers)
    if "content-type" not in map(str.lower, headers):
        del response["Content-Type"]
    return response


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()
