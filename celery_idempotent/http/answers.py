"""Answers as data: problems (RFC 9457), and the stored response of a view.

It is an HTTP message::

HTTP/1.1 201 Created
Content-Type: application/json
Location: /payments/17/

{"id": 17}
"""

from __future__ import annotations

import datetime
import decimal
import json
import logging
import re
import uuid
from collections.abc import Mapping
from functools import lru_cache, singledispatch
from operator import methodcaller
from typing import Final, NamedTuple

from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.records import Stored
from celery_idempotent.serializers import HTTP, Serializer

logger = logging.getLogger(__name__)

#: Says after how many seconds a client may ask again.
WAIT: Final = (("Retry-After", "1"),)
#: Tells a replay from the first answer.
REPLAYED: Final = "Idempotent-Replayed"

Headers = list[tuple[str, str]]
#: Status, reason, headers and body of a response, and why its body is not stored, if that is so.
Parts = tuple[int, str, Headers, bytes, str]


@singledispatch
def as_text(value: object) -> str:
    """Return what tasks return and JSON has no form for; a framework may register more types."""
    raise TypeError(f"A {type(value).__name__} has no form in JSON.")


as_text.register(decimal.Decimal, str)
as_text.register(uuid.UUID, str)
as_text.register(datetime.date, methodcaller("isoformat"))
as_text.register(datetime.time, methodcaller("isoformat"))


class Answer(NamedTuple):
    """An answer for a web framework to send."""

    status: int
    headers: Headers
    body: bytes
    reason: str | None = None


def json_answer(status: int, headers: Headers, body: Mapping[str, object]) -> Answer:
    """Return an answer whose body is JSON, unless a header says what it is."""
    if "Content-Type" not in dict(headers):
        headers = [("Content-Type", "application/json"), *headers]
    return Answer(status, headers, json.dumps(body, default=as_text).encode())


# -- problems ----------------------------------------------------------------------------------------------------------

#: code -> status, title, whether the same request with the same key may succeed later.
CONDITIONS: Final[dict[str, tuple[int, str, bool]]] = {
    "idempotency_key_missing": (400, "The idempotency key is missing", False),
    "idempotency_key_invalid": (400, "The idempotency key is invalid", False),
    "body_unreadable": (400, "The request body cannot be parsed", False),
    "body_incomplete": (400, "The request body is incomplete", True),
    "caller_unknown": (403, "The caller is not identified", False),
    "replay_refused": (403, "Access to the stored response is denied", False),
    "unknown_key": (404, "The key is unknown", False),
    "request_in_progress": (409, "A request with this key is in progress", True),
    "result_not_kept": (410, "The request was completed, but its result was not stored", False),
    "length_required": (411, "The Content-Length header is missing", False),
    "request_too_large": (413, "The request is too large", False),
    "idempotency_key_reused": (422, "The key was used for another request", False),
    "failed_by_operator": (500, "An operator marked the request as failed", False),
    "task_failed": (500, "The task failed", False),
    "too_many_crashes": (500, "The request exceeded its number of crashes", False),
    "store_unavailable": (503, "The idempotency store is unavailable", True),
    "rolled_back": (503, "The transaction was rolled back", True),
    "result_unavailable": (503, "The result backend is unavailable", True),
    "not_queued": (503, "The task could not be queued", True),
    "timed_out": (504, "The task timed out", False),
}

#: The answer whenever something broke: it may have been carried out, and only the reply was lost.
UNSURE: Final = (
    "The request may have been carried out. Send it again with the same key: it takes effect once."
)


class RequestRefused(Exception):
    """A request that is not carried out; ``code`` is one of :data:`CONDITIONS`."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code

    def answer(self, docs_url: str | None = None) -> Answer:
        """Return the answer to the request."""
        return make_problem(self.code, str(self), docs_url=docs_url)


def make_problem(
    code: str,
    detail: str,
    *,
    status: int | None = None,
    title: str | None = None,
    retryable: bool | None = None,
    docs_url: str | None = None,
    **members: object,
) -> Answer:
    """Return a problem: one of the library's, or one of your own with ``status``, ``title`` and ``retryable``.

    A 409 and a 503 have ``Retry-After``. With ``docs_url`` the type is a link into it, else ``about:blank``.
    """
    usual_status, usual_title, usual_retryable = CONDITIONS.get(code, (400, code, False))
    status = status or usual_status
    headers = [("Content-Type", "application/problem+json"), ("Cache-Control", "no-store")]
    headers += WAIT if status in (409, 503) else ()
    if docs_url:
        headers.append(("Link", f'<{docs_url}>; rel="describedby"; type="text/html"'))
    body: dict[str, object] = {
        "type": f"{docs_url}#{code}" if docs_url else "about:blank",
        "title": title or usual_title,
        "status": status,
        "detail": detail,
        "code": code,
        "retryable": usual_retryable if retryable is None else retryable,
        **members,
    }
    return json_answer(status, headers, body)


# -- stored responses --------------------------------------------------------------------------------------------------

#: In the record only: the response was sent whole, and its body is not stored.
_NOT_KEPT: Final = "Idempotent-Body-Not-Kept"
#: Headers that are not stored: of one answer or one login; of one connection (RFC 9110, 7.6.1); of one trace; our own.
_NEVER_KEPT: Final = frozenset(
    f"""
    age authentication-info date set-cookie www-authenticate
    connection content-length keep-alive proxy-authenticate proxy-authentication-info proxy-connection te trailer
    transfer-encoding upgrade via b3 server-timing traceparent tracestate traceresponse uber-trace-id x-amzn-trace-id
    x-b3-sampled x-b3-spanid x-b3-traceid x-cloud-trace-context x-correlation-id x-request-id {REPLAYED} {_NOT_KEPT}
    """.lower().split()
)
#: What a server sends: names are tokens, and no text has a control character (RFC 9110, 5.5 and 5.6.2).
_TEXT: Final = r"[\t -~\x80-\xff]*"
_HEAD: Final = re.compile(
    rf"HTTP/1\.1 ([2-5][0-9][0-9]) ({_TEXT})((?:\r\n[-!#$%&'*+.^_`|~0-9A-Za-z]+: {_TEXT})*)"
)
_HEADER: Final = re.compile(r"\r\n([^:]+): ([^\r]*)")


class ResponseCodec:
    """Stores the responses of a view; errors and steps as JSON."""

    def __init__(self, view: str, max_bytes: int) -> None:
        self._view, self._max_bytes = view, max_bytes
        self._json = Serializer()
        self.load_value = self._json.load

    def dump_value(self, stored: Stored) -> Stored:
        """Return a response that was packed when its view returned."""
        return stored

    def pack(self, parts: Parts) -> Stored:
        """Return what is stored of a response, without its body if that is too large, or streamed.

        One with a status or a header that no server sends is a ``ValueError``: a line feed would begin another header.
        """
        status, reason, headers, body, why = parts
        if len(body) > self._max_bytes:
            why = f"it has {len(body)} bytes"
        head = _written(status, reason, tuple(headers), why)
        if head is None:
            raise ValueError(
                f"No server can send the status or a header of this response of {self._view}."
            )
        if why:
            body = b""
            line = "idempotency: the response of %s is not stored (%s): a repetition gets 410"
            logger.warning(line, self._view, why)
        return Stored(HTTP, "binary", head + body)

    def dump_error(self, error: BaseException) -> Stored:
        """Store what a caller may know."""
        return self._json.dump({"exc_type": type(error).__name__, "exc_message": str(error)})

    def dump_step(self, name: str, value: object) -> Stored:  # noqa: ARG002
        """Serialize the result of a step; :exc:`.NotStored` if that cannot be."""
        return self._json.dump(value, max_bytes=self._max_bytes)


# Most responses of a view have the same: 5 % of a first request's instructions.
@lru_cache(maxsize=64)
def _written(
    status: int, reason: str, headers: tuple[tuple[str, str], ...], why: str
) -> bytes | None:
    """Return the head of a message, ``None`` for one that no server sends."""
    if not reason.isascii():
        reason = reason.encode("ascii", "replace").decode()
    start = f"HTTP/1.1 {status} {reason}"
    lines = [f"{name}: {value}" for name, value in headers]
    head = "\r\n".join([start, *lines])
    if not _HEAD.fullmatch(head) or head.count("\r\n") > len(lines):
        return None
    kept = [line for line in lines if line.partition(":")[0].lower() not in _NEVER_KEPT]
    if why:
        kept = [f"{_NOT_KEPT}: {why}"]
    return "\r\n".join([start, *kept, "", ""]).encode("latin-1")


def read_response(stored: Stored) -> Answer:
    """Return the response that was stored, marked as a replay; raise ``ResultUnavailable`` without one."""
    head, _, body = stored.body.partition(b"\r\n\r\n")
    status, reason, headers = _read(head if stored.content_type == HTTP else b"")
    return Answer(status, [*headers, (REPLAYED, "true")], body, reason)


@lru_cache(maxsize=64)  # as above: 6 % of a repetition's
def _read(head: bytes) -> tuple[int, str, Headers]:
    found = _HEAD.fullmatch(head.decode("latin-1"))
    if found is None:
        raise ResultUnavailable("What is stored for this key cannot be read as a response.")
    status, reason, lines = found.groups()
    headers: Headers = _HEADER.findall(lines)
    if headers and headers[0][0] == _NOT_KEPT:
        raise ResultUnavailable(
            f"The request was carried out and answered with {status}; the response was not kept: {headers[0][1]}."
        )
    kept = [each for each in headers if each[0].lower() not in _NEVER_KEPT]
    return int(status), reason, kept
