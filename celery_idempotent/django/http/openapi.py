"""What drf-spectacular needs to know: the header, and the answers that a guarded view gives beside its own.

``DEFAULT_SCHEMA_CLASS = "celery_idempotent.django.http.openapi.AutoSchema"``, or the mixin with a class of your own.
"""

from __future__ import annotations

from typing import Any, Final

from drf_spectacular.openapi import AutoSchema as SpectacularSchema
from drf_spectacular.utils import OpenApiParameter

from celery_idempotent.django.http.options import HttpOptions
from celery_idempotent.django.http.rest import StatusView
from celery_idempotent.django.http.views import Marks, marks_of
from celery_idempotent.records import State

_PROBLEM: Final[dict[str, object]] = {
    "type": "object",
    "title": "Problem",
    "description": "RFC 9457",
    "properties": {
        "type": {"type": "string"},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "detail": {"type": "string"},
        "code": {"type": "string"},
        "retryable": {
            "type": "boolean",
            "description": "May the same request with the same key succeed later?",
        },
    },
    "required": ["type", "title", "status", "detail", "code", "retryable"],
}
_STATUS: Final[dict[str, object]] = {
    "type": "object",
    "title": "OperationStatus",
    "properties": {
        "namespace": {"type": "string"},
        "key": {"type": "string"},
        "state": {
            "type": "string",
            "enum": [state.name for state in State],
        },
        "settled": {"type": "boolean"},
        "created_at": {"type": "string", "format": "date-time"},
        "updated_at": {"type": "string", "format": "date-time"},
        "crashes": {"type": "integer"},
        "result": {},
        "result_kept": {"type": "boolean"},
        "error": {"type": "object", "additionalProperties": True},
        "retryable": {"type": "boolean"},
        "url": {"type": "string", "nullable": True},
    },
    "required": [
        "namespace",
        "key",
        "state",
        "settled",
        "created_at",
        "updated_at",
        "crashes",
    ],
}
#: What every key may be; one that is no number may have two characters more.
_PATTERN: Final = r'^"([ !#-\[\]-~]|\\["\\]){1,253}"$'
_BARE_PATTERN: Final = r"^[!#-+\--:<-\[\]-~]{1,253}$"
_REFUSALS: Final = {
    400: "The Idempotency-Key header is missing or malformed, or the body is not valid or not whole.",
    409: "A request with this key is in progress; see Retry-After.",
    411: "The body has no Content-Length, and this server needs one.",
    413: "The request is too large.",
    422: "This key belongs to another request.",
    503: "It cannot be checked whether this is a repetition, or the task could not be queued; see Retry-After.",
}
_GUARDED: Final = {410: "The request was carried out, and its response was not kept."}
_QUEUED: Final = {
    500: "The task failed for good; `retryable` says whether the same key may be tried again.",
    504: "The task never came back.",
}


class IdempotencySchemaMixin:
    """Adds to what drf-spectacular finds out about an operation."""

    def get_override_parameters(self) -> list[Any]:
        """Add the header of a guarded method."""
        found = list(super().get_override_parameters())  # type: ignore[misc]  # a mixin's
        marks = self._marks()
        if marks is not None:
            found.append(_header(marks.options))
        return found

    def get_response_serializers(self) -> Any:
        """Leave the status resource to what is said here."""
        if isinstance(self.view, StatusView):  # type: ignore[attr-defined]  # a mixin's
            return {}
        return super().get_response_serializers()  # type: ignore[misc]  # a mixin's

    def _get_response_bodies(self, *args: object, **kwargs: object) -> dict[str, object]:
        found: dict[str, object] = super()._get_response_bodies(*args, **kwargs)  # type: ignore[misc]  # a mixin's
        marks = self._marks()
        own: dict[int, object] = {}
        if marks is not None:
            texts = _REFUSALS | (_GUARDED if marks.guards else _QUEUED)
            own = {status: _problem(text) for status, text in texts.items()}
            if not marks.guards:
                own[200] = _status("It was done before: the result.")
                own[202] = _status("It is queued or in progress; see Location and Retry-After.")
        elif isinstance(self.view, StatusView):  # type: ignore[attr-defined]  # a mixin's
            own = {
                200: _status("The status.", page=True),
                304: {"description": "It is as the ETag says."},
                404: _problem("The caller has no such key."),
                503: _problem("The store or the result backend does not answer; see Retry-After."),
            }
        # What the project says about a status of its own stays.
        return {**{str(status): answer for status, answer in own.items()}, **found}

    def _marks(self) -> Marks | None:
        view: Any = self.view  # type: ignore[attr-defined]  # a mixin's
        method = str(self.method)  # type: ignore[attr-defined]  # a mixin's
        handler = getattr(view, str(getattr(view, "action", "") or ""), None) or getattr(
            view, method.lower(), None
        )
        marks = marks_of(handler) or marks_of(view)
        return marks if marks is not None and method in marks.options.methods else None


class AutoSchema(IdempotencySchemaMixin, SpectacularSchema):
    """drf-spectacular's schema, with idempotency."""


def _header(options: HttpOptions) -> OpenApiParameter:
    return OpenApiParameter(
        "Idempotency-Key",
        type={
            "type": "string",
            "pattern": _PATTERN if options.strict else f"{_PATTERN}|{_BARE_PATTERN}",
        },
        location=OpenApiParameter.HEADER,
        required=options.required,
        description=(
            "A value that is new for each intention, such as a UUID, and the same for each attempt at it: a string of "
            'RFC 9651 in double quotes, `"8e03978e-40d5"`'
            + ("." if options.strict else ", or the bare value.")
        ),
    )


def _problem(description: str) -> dict[str, object]:
    return {
        "description": description,
        "content": {"application/problem+json": {"schema": _PROBLEM}},
    }


def _status(description: str, *, page: bool = False) -> dict[str, object]:
    content: dict[str, object] = {"application/json": {"schema": _STATUS}}
    if page:
        content["text/html"] = {"schema": {"type": "string"}}
    return {"description": description, "content": content}
