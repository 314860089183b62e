"""Where an operation is, as an API says it: the status resource, the answers of a queued task, and a view's failure.

::

    {"namespace": "shop.charge", "key": "order-17", "state": "PROCESSING", "settled": false, …}
    {…, "state": "COMPLETED", "settled": true, …, "result": {"charge": "ch_17"}}
    {…, "state": "FAILED", "settled": true, …, "error": {"type": "CardDeclined", …}, "retryable": false}
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kombu.exceptions import ContentDisallowed, SerializationError

from celery_idempotent import errors
from celery_idempotent.http.answers import (
    CONTENT_TYPE,
    REPLAYED,
    RETRY_AFTER,
    Answer,
    Headers,
    RequestRefused,
    make_problem,
    read_response,
)
from celery_idempotent.records import Record, State
from celery_idempotent.serializers import Serializer

if TYPE_CHECKING:
    from celery_idempotent.celery.definition import DefinedTask

logger = logging.getLogger(__name__)

Encoder = type[json.JSONEncoder]
ErrorStatus = Mapping[type[BaseException], int]

#: Errors of the library's own, by the names that records have, with their codes for programs.
_OWN: Final[dict[str, tuple[type[errors.IdempotencyError], str]]] = {
    "FailedByOperator": (errors.FailedByOperator, "failed_by_operator"),
    "ProcessingTimedOut": (errors.ProcessingTimedOut, "timed_out"),
    "TooManyCrashes": (errors.TooManyCrashes, "too_many_crashes"),
}
_SERIALIZER: Final = Serializer()


def operation_answer(
    record: Record,
    *,
    key: str,
    task: DefinedTask,
    url: str | None,
    replayed: bool,
    error_status: ErrorStatus,
    docs_url: str | None,
    encoder: Encoder,
) -> Answer:
    """Return the answer to a request that a task carries out: 202 until it is done, 200 with the result, its error.

    Raises:
        RequestRefused: ``result_unavailable``, if the result backend does not answer.
    """
    marks: Headers = [(REPLAYED, "true")] if replayed else []
    if record.state is State.FAILED:
        failure = failure_of(record, task)
        mro = getattr(failure.kind, "__mro__", ())
        problem = make_problem(
            failure.code,
            failure.detail,
            status=next((error_status[each] for each in mro if each in error_status), None),
            retryable=False,
            docs_url=docs_url,
            state=record.state.value,
            error=failure.error,
        )
        return problem._replace(headers=problem.headers + marks)
    described = describe(record, key=key, task=task, encoder=encoder)
    headers = [("Cache-Control", "no-store"), *marks]
    if url:
        headers.append(("Content-Location" if described["settled"] else "Location", url))
    headers += _retry_after(described)
    return Answer(200 if described["settled"] else 202, headers, {**described, "url": url})


def status_answer(
    record: Record, *, key: str, task: DefinedTask | None, encoder: Encoder
) -> Answer:
    """Return the answer of the status resource about a key of the caller.

    Raises:
        RequestRefused: ``result_unavailable``, if the result backend does not answer.
    """
    described = describe(record, key=key, task=task, encoder=encoder)
    body = json.dumps(described, cls=encoder).encode()
    headers = [
        ("Content-Type", "application/json"),
        ("ETag", f'"{hashlib.sha256(body).hexdigest()[:32]}"'),
        ("Cache-Control", "private, no-cache"),
    ]
    return Answer(200, [*headers, *_retry_after(described)], body)


def _retry_after(described: Mapping[str, object]) -> Headers:
    return [] if described["settled"] else [("Retry-After", str(RETRY_AFTER))]


def describe(
    record: Record, *, key: str, task: DefinedTask | None, encoder: Encoder = json.JSONEncoder
) -> dict[str, Any]:
    """Return what the status resource says: JSON for this encoder, in an order for people.

    Raises:
        RequestRefused: ``result_unavailable``, if the result backend does not answer.
    """
    state, members = record.state, dict[str, object]()
    if state is State.INTERRUPTED:
        members = {"retryable": True}
    elif state is State.COMPLETED:
        state, members = _result_of(record, task)
        try:
            json.dumps(members, cls=encoder)
        except Exception:  # noqa: BLE001  whatever the parts of a result do when they are asked
            members = {"result_kept": False}
    elif state is State.FAILED:
        failure = failure_of(record, task)
        error = {**failure.error, "code": failure.code, "detail": failure.detail}
        members = {"error": error, "retryable": failure.retryable}
    return {
        "namespace": record.identity.namespace,
        "key": key,
        "state": state.value,
        "settled": state.settled,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "crashes": record.crashes,
        **members,
    }


def _result_of(record: Record, task: DefinedTask | None) -> tuple[State, dict[str, object]]:
    """Return the state and the result of a COMPLETED record: the task that replaced this one may still run."""
    value, definition = record.value, None if task is None else task.idempotency_definition()
    try:
        if value is not None and value.content_type == CONTENT_TYPE:
            # The status alone: the view may ask who repeats its answer (authorize), the status resource cannot.
            return record.state, {"result": {"status": read_response(value).status}}
        if task is None or definition is None:
            return record.state, {}  # kept or not: who knows this task can say
        if value is not None and not record.replaced:
            return record.state, {"result": definition.codec.load_value(value)}
        outcome = task.AsyncResult(record.task_id)
        if outcome.state == "SUCCESS":
            return record.state, {"result": outcome.result}
        if record.replaced and not outcome.ready():
            return State.PROCESSING, {}
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
    return record.state, {"result_kept": False}


class Failure(NamedTuple):
    """Why an operation failed, as far as its caller may know; ``kind`` is the class of the error, if that is known."""

    kind: type[BaseException] | None
    code: str
    detail: str
    retryable: bool
    error: dict[str, str]


def failure_of(record: Record, task: DefinedTask | None) -> Failure:
    """Return why a FAILED record failed.

    An error that the task declared permanent is part of its interface, and its text is shown; what any other says may
    be for the project's own eyes, so only its type is.
    """
    definition = None if task is None else task.idempotency_definition()
    kind: type[BaseException] | None
    text: object
    if definition is not None:
        try:
            kind, text = definition.codec.describe_error(record.value)
        except errors.IdempotencyError as unreadable:
            kind, text = type(unreadable), unreadable
        name = kind.__name__ if kind else ""
    else:  # a view's: all that is kept of it is what its caller may know
        found: object = None
        if record.value is not None:
            with contextlib.suppress(errors.IdempotencyError):
                found = _SERIALIZER.load(record.value)
        parts = found if isinstance(found, dict) else {}
        name, text = _sendable(parts.get("exc_type", "")), parts.get("exc_message", "")
        kind = _OWN[name][0] if name in _OWN else None
    is_permanent = (
        definition is not None
        and kind is not None
        and issubclass(kind, definition.policy.permanent_errors)
    )
    is_final = is_permanent or (kind is not None and issubclass(kind, errors.IdempotencyError))
    message = _sendable(text) if is_final else ""
    return Failure(
        kind=kind,
        code=_OWN[name][1] if name in _OWN else "task_failed",
        detail=message or "The operation failed.",
        retryable=kind is not None and not is_final,
        error={"type": name, "message": message} if message else {"type": name},
    )


def _sendable(value: object) -> str:
    """Return what a stored value says, as a text that can be sent."""
    try:
        return str(value).encode("utf-8", "replace").decode()
    except Exception:  # noqa: BLE001  an exception of the project's own
        return ""
