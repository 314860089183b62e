"""What goes wrong, as ``application/problem+json`` (RFC 9457): one code a condition, for programs to act on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple

#: What ``Retry-After`` says, in seconds.
RETRY_AFTER: Final = 1

#: code -> status, title, whether the same request with the same key may succeed later.
CONDITIONS: Final[dict[str, tuple[int, str, bool]]] = {
    "idempotency_key_missing": (400, "The Idempotency-Key header is missing", False),
    "idempotency_key_invalid": (400, "The Idempotency-Key header cannot be read", False),
    "body_unreadable": (400, "The body cannot be read", False),
    "body_incomplete": (400, "The body broke off", True),
    "caller_unknown": (403, "Idempotent requests need a caller", False),
    "unknown_key": (404, "There is no such key", False),
    "request_in_progress": (409, "A request with this key is in progress", True),
    "result_not_kept": (410, "The request was carried out, and its result was not kept", False),
    "length_required": (411, "The length of the body is missing", False),
    "request_too_large": (413, "The request is too large", False),
    "idempotency_key_reused": (422, "This key belongs to another request", False),
    "failed_by_operator": (500, "An operator settled it as failed", False),
    "task_failed": (500, "The task failed", False),
    "too_many_crashes": (500, "The request took its process down too often", False),
    "store_unavailable": (503, "It cannot be checked whether this is a repetition", True),
    "rolled_back": (503, "The transaction was rolled back", True),
    "result_unavailable": (503, "The result cannot be fetched", True),
    "not_queued": (503, "The task could not be queued", True),
    "timed_out": (504, "The task never came back", False),
}


class Problem(NamedTuple):
    """An answer in JSON that says what went wrong."""

    status: int
    headers: Mapping[str, str]
    body: Mapping[str, object]


class RequestRefused(Exception):
    """A request that is not carried out."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail

    def problem(self, docs_url: str | None = None) -> Problem:
        """Return the answer."""
        wait = RETRY_AFTER if CONDITIONS[self.code][0] in (409, 503) else None
        return make_problem(self.code, self.detail, retry_after=wait, docs_url=docs_url)


def make_problem(
    code: str,
    detail: str,
    *,
    status: int | None = None,
    title: str | None = None,
    retryable: bool | None = None,
    retry_after: float | None = None,
    docs_url: str | None = None,
    **members: object,
) -> Problem:
    """Return a problem: one of :data:`CONDITIONS`, or one of your own with ``status``, ``title`` and ``retryable``.

    ``retry_after`` are seconds. With ``docs_url`` the type is a link into it, else ``about:blank``.
    """
    usual_status, usual_title, usual_retryable = CONDITIONS.get(code, (400, code, False))
    headers = {"Content-Type": "application/problem+json", "Cache-Control": "no-store"}
    if retry_after is not None:
        headers["Retry-After"] = str(max(math.ceil(retry_after), 1))
    if docs_url:
        headers["Link"] = f'<{docs_url}>; rel="describedby"; type="text/html"'
    body: dict[str, object] = {
        "type": f"{docs_url}#{code}" if docs_url else "about:blank",
        "title": title or usual_title,
        "status": status or usual_status,
        "detail": detail,
        "code": code,
        "retryable": usual_retryable if retryable is None else retryable,
        **members,
    }
    return Problem(status or usual_status, headers, body)
