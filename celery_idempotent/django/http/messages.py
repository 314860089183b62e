"""A response as it is kept: an HTTP message in the record, and back to the bytes that the first caller got.

::

    HTTP/1.1 201 Created
    Idempotent-Attributes: {"xframe_options_exempt": true}
    Content-Type: application/json
    Location: /payments/17/

    {"id": 17}
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from django.core.exceptions import ImproperlyConfigured
from django.http import FileResponse, HttpResponse, HttpResponseBase

from celery_idempotent.django.http.options import HttpOptions
from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.identity.arguments import type_name
from celery_idempotent.records import Stored

if TYPE_CHECKING:
    from collections.abc import Iterator

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
#: Attributes of a response that are kept for its replays: decorators of Django and of django-csp set them, and their
#: middleware reads them.
KEPT_ATTRIBUTES: Final = (
    "xframe_options_exempt",
    "_csp_config",
    "_csp_ro_config",
    "_csp_config_ro",
    "_csp_exempt",
    "_csp_exempt_ro",
    "_csp_replace",
    "_csp_replace_ro",
    "_csp_update",
    "_csp_update_ro",
)
#: Tells a replay from the first answer.
REPLAYED: Final = "Idempotent-Replayed"
#: In the record only: the response was sent whole, and its body is not kept.
_NOT_KEPT: Final = "Idempotent-Body-Not-Kept"
#: In the record only: what the middleware outside is to find on the response, as JSON.
_ATTRIBUTES: Final = "Idempotent-Attributes"
_NOT_FROM_VIEW: Final = NEVER_KEPT | {each.lower() for each in (REPLAYED, _NOT_KEPT, _ATTRIBUTES)}
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


def finished(response: HttpResponseBase, options: HttpOptions) -> HttpResponseBase:
    """Return the response with its body rendered, a file of known and bearable size read whole.

    Every other stream stays one: what it would bring is not known before it is sent.
    """
    if not getattr(response, "is_rendered", True):
        response = response.render()  # type: ignore[attr-defined]  # of a template
    if not isinstance(response, FileResponse) or response.is_async:
        return response
    length = str(response.headers.get("Content-Length", ""))
    if not length.isdecimal() or int(length) > options.max_response_bytes:
        return response
    whole = HttpResponse(
        b"".join(_chunks(response)), status=response.status_code, headers=response.headers
    )
    whole.cookies = response.cookies
    for attribute in set(KEPT_ATTRIBUTES) & vars(response).keys():
        setattr(whole, attribute, getattr(response, attribute))
    # The file is closed with the response that is sent.
    whole._resource_closers.extend(response._resource_closers)  # type: ignore[attr-defined]  # noqa: SLF001
    return whole


def _chunks(response: FileResponse) -> Iterator[bytes]:
    for chunk in response:
        yield bytes(chunk)


def pack_response(response: HttpResponseBase, options: HttpOptions, *, name: str) -> Stored:
    """Return the status, the headers that are kept, and the body, or in its place a note that it is not kept."""
    body, why = (
        (response.content, "") if isinstance(response, HttpResponse) else (b"", "it is streamed")
    )
    if len(body) > options.max_response_bytes:
        body, why = b"", f"it has {len(body)} bytes"
    try:
        attributes = _attributes_of(response)
    except TypeError as error:
        # Without it the middleware would send the replay as it should not be.
        attributes, body, why = {}, b"", str(error)
    lines = [f"HTTP/1.1 {response.status_code} {_ascii(response.reason_phrase)}"]
    if attributes:
        lines.append(f"{_ATTRIBUTES}: {json.dumps(attributes)}")
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


def _attributes_of(response: HttpResponseBase) -> dict[str, object]:
    """Return what the middleware outside is to find on a replay.

    Raises:
        TypeError: if it is nothing that JSON can say.
    """
    return {
        name: _as_json(getattr(response, name), name)
        for name in KEPT_ATTRIBUTES
        if hasattr(response, name)
    }


def _as_json(value: object, name: str) -> object:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {str(key): _as_json(each, name) for key, each in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        # A nonce is for one answer: without it a policy is stricter.
        return [_as_json(each, name) for each in items if repr(each) != "csp.constants.NONCE"]
    raise TypeError(f"its attribute {name} is a {type(value).__name__}, which is not kept")


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

    Headers of ours that the record alone has are taken out. A middleware outside of the view reads attributes such as
    ``xframe_options_exempt`` off the response.

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
    attributes = headers.pop(_ATTRIBUTES, None)
    headers[REPLAYED] = "true"
    response = HttpResponse(body, status=int(status), reason=reason, headers=headers)
    if "content-type" not in map(str.lower, headers):
        del response["Content-Type"]
    if attributes is not None:
        for name, value in json.loads(attributes).items():
            if name in KEPT_ATTRIBUTES:
                setattr(response, name, value)
    return response


def _ascii(text: str) -> str:
    return text.encode("ascii", "replace").decode()
