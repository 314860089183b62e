"""A response as it is stored: an HTTP message in the record, and back to the bytes that the first caller got.

::

    HTTP/1.1 201 Created
    Content-Type: application/json
    Location: /payments/17/

    {"id": 17}
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final, NamedTuple

from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.records import Stored

logger = logging.getLogger(__name__)

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
#: In the record only: the response was sent whole, and its body is not kept.
_NOT_KEPT: Final = "Idempotent-Body-Not-Kept"
_NOT_FROM_VIEW: Final = NEVER_KEPT | {each.lower() for each in (REPLAYED, _NOT_KEPT)}
_MAX_HEAD: Final = 32 * 1024


class StoredResponse(NamedTuple):
    """A response: its status, the headers in their order, the body."""

    status: int
    reason: str
    headers: list[tuple[str, str]]
    body: bytes


def pack_response(
    status: int,
    reason: str,
    headers: Iterable[tuple[str, str]],
    body: bytes,
    *,
    max_bytes: int,
    name: str,
    why: str = "",
) -> Stored:
    """Return the status, the headers that are kept, and the body, or in its place a note that it is not kept.

    ``why`` says for which reason there is no body. ``name`` is that of the view, for people.
    """
    if len(body) > max_bytes:
        why = why or f"it has {len(body)} bytes"
    lines = [f"HTTP/1.1 {status} {reason.encode('ascii', 'replace').decode()}"]
    if why:
        body = b""
        logger.warning(
            "idempotency: the response of %s is not kept (%s): a repetition is told so", name, why
        )
        lines.append(f"{_NOT_KEPT}: {why}")
    lines += [f"{key}: {value}" for key, value in headers if key.lower() not in _NOT_FROM_VIEW]
    head = "\r\n".join(lines).encode("latin-1", "replace")
    if len(head) > _MAX_HEAD:
        raise ValueError(f"the headers of the response of {name} have more than {_MAX_HEAD} bytes")
    return Stored(
        content_type=CONTENT_TYPE,
        content_encoding="binary",
        body=head + b"\r\n\r\n" + body,
    )


def read_response(stored: Stored) -> StoredResponse:
    """Return the response that was kept, marked as a replay.

    Raises:
        ResultUnavailable: if its body was not kept, or it cannot be read.
    """
    if stored.content_type != CONTENT_TYPE:
        raise ResultUnavailable("What is stored for this key is no response.")
    try:
        head, _, body = stored.body.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines)
        _, status, reason = first.split(" ", 2)
        found = StoredResponse(int(status), reason, [*headers.items(), (REPLAYED, "true")], body)
    except ValueError as error:
        problem = f"What is stored for this key cannot be read ({type(error).__name__})."
        raise ResultUnavailable(problem) from None
    if why := headers.get(_NOT_KEPT):
        raise ResultUnavailable(
            f"The request was carried out and answered with {status}; the response was not kept: {why}."
        )
    return found
