"""A record in the words of an API: where the operation is, when, and what came of it.

::

    {"namespace": "shop.charge", "key": "order-17", "state": "PROCESSING", "settled": false, …}
    {…, "state": "COMPLETED", "settled": true, …, "result": {"charge": "ch_17"}}
    {…, "state": "FAILED", "settled": true, …, "error": {"type": "CardDeclined", …}, "retryable": false}
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kombu.exceptions import ContentDisallowed, SerializationError

from celery_idempotent import errors
from celery_idempotent.http.problems import RequestRefused
from celery_idempotent.http.responses import CONTENT_TYPE, read_response
from celery_idempotent.records import Record, State, Stored
from celery_idempotent.serializers import Serializer

if TYPE_CHECKING:
    from celery_idempotent.celery.definition import DefinedTask

logger = logging.getLogger(__name__)

#: Errors of the library's own that have a code for programs, and the same by their names, as records have them.
_CODES: Final[dict[type[errors.IdempotencyError], str]] = {
    errors.FailedByOperator: "failed_by_operator",
    errors.ProcessingTimedOut: "timed_out",
    errors.TooManyCrashes: "too_many_crashes",
}
_OWN: Final = {each.__name__: each for each in _CODES}


_SERIALIZER: Final = Serializer()


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """Why an operation failed, as far as its caller may know; ``kind`` is the class of the error, if that is known."""

    kind: type[BaseException] | None
    code: str
    detail: str
    retryable: bool
    error: dict[str, str]


def describe(
    record: Record,
    *,
    key: str,
    task: DefinedTask | None,
    encoder: type[json.JSONEncoder] = json.JSONEncoder,
) -> dict[str, Any]:
    """Return what the status resource says: JSON for this encoder, in an order for people."""
    result, state = _result_of(record, task, encoder)
    described: dict[str, object] = {
        "namespace": record.identity.namespace,
        "key": key,
        "state": state.value,
        "settled": state.settled,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "crashes": record.crashes,
    }
    if state is State.INTERRUPTED:
        described["retryable"] = True
    if state is State.COMPLETED:
        described |= result
    if state.is_failure:
        failure = failure_of(record, task)
        described |= {
            "error": {**failure.error, "code": failure.code, "detail": failure.detail},
            "retryable": failure.retryable,
        }
    return described


def failure_of(record: Record, task: DefinedTask | None) -> Failure:
    """Return why a FAILED record failed.

    An error that the task declared permanent is part of its interface, and its text is shown; what any other says may
    be for the project's own eyes, so only its type is.
    """
    error, kind, message = _error_of(record, task)
    permanent = False
    if task is not None and error is not None:
        permanent = issubclass(error, task.idempotency_policy.permanent_errors)
    own = error is not None and issubclass(error, errors.IdempotencyError)
    code = _CODES[_OWN[kind]] if kind in _OWN else "task_failed"
    shown = permanent or own
    described = {"type": kind}
    if shown and message:
        described["message"] = message
    detail = message if shown and message else "The operation failed."
    retryable = error is not None and not permanent and not own
    return Failure(kind=error, code=code, detail=detail, retryable=retryable, error=described)


def _error_of(
    record: Record, task: DefinedTask | None
) -> tuple[type[BaseException] | None, str, str]:
    """Return the class of the error, ``None`` if that is not known; its name, and its text."""
    definition = None if task is None else task.idempotency_definition()
    if definition is not None:
        try:
            error, text = definition.codec.describe_error(record.value)
        except errors.IdempotencyError as unreadable:
            error, text = type(unreadable), unreadable
        return error, error.__name__, _sendable(text)
    # A view's: all that is kept of it is what its caller may know.
    found: object = None
    if record.value is not None:
        with contextlib.suppress(errors.IdempotencyError):
            found = _SERIALIZER.load(record.value)
    parts = found if isinstance(found, dict) else {}
    kind, message = _sendable(parts.get("exc_type", "")), _sendable(parts.get("exc_message", ""))
    return _OWN.get(kind), kind, message


def _sendable(value: object) -> str:
    """Return what a stored value says, as a text that can be sent."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001  an exception of the project's own
        return ""


def _result_of(
    record: Record, task: DefinedTask | None, encoder: type[json.JSONEncoder]
) -> tuple[dict[str, object], State]:
    """Return the members about the result, and the state: the task that replaced this one may still run.

    Raises:
        RequestRefused: ``result_unavailable``, if the result backend does not answer.
    """
    if record.state is not State.COMPLETED:
        return {}, record.state
    if record.value is not None and record.value.content_type == CONTENT_TYPE:
        return _response_of(record.value), record.state
    definition = None if task is None else task.idempotency_definition()
    if task is None or definition is None:
        return {}, record.state  # kept or not: who knows this task can say
    try:
        if record.value is not None and not record.replaced:
            return _if_json(
                {"result": definition.codec.load_value(record.value)}, encoder
            ), record.state
        outcome = task.AsyncResult(record.task_id)
        if outcome.state == "SUCCESS":
            return _if_json({"result": outcome.result}, encoder), record.state
        if record.replaced and not outcome.ready():
            return {}, State.PROCESSING
    except (errors.IdempotencyError, AttributeError, NotImplementedError):
        pass  # unreadable, or there is no result backend
    except (SerializationError, ContentDisallowed):
        pass  # in the backend, and unreadable
    except Exception as error:
        logger.warning(
            "idempotency: the result of %s cannot be fetched", record.identity, exc_info=True
        )
        raise RequestRefused(
            "result_unavailable",
            "It is done, and its result cannot be fetched just now. Ask again later.",
        ) from error
    return {"result_kept": False}, record.state


def _response_of(stored: Stored) -> dict[str, object]:
    """Return the status alone: the view may ask who repeats its answer (``authorize``), this resource cannot."""
    try:
        return {"result": {"status": read_response(stored).status}}
    except errors.ResultUnavailable:
        return {"result_kept": False}


def _if_json(members: dict[str, object], encoder: type[json.JSONEncoder]) -> dict[str, object]:
    """Return the members if JSON can say them."""
    try:
        json.dumps(members, cls=encoder)
    except Exception:  # noqa: BLE001  whatever the parts of a result do when they are asked
        return {"result_kept": False}
    return members
