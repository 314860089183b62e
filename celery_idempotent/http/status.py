"""Where an operation is, as the status resource and the answers of ``enqueue()`` say it.

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
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kombu.exceptions import ContentDisallowed, SerializationError

from celery_idempotent import errors
from celery_idempotent.celery.definition import definition_of
from celery_idempotent.http.answers import (
    WAIT,
    Answer,
    RequestRefused,
    as_text,
    json_answer,
    read_response,
)
from celery_idempotent.http.requests import http_identity
from celery_idempotent.records import Record, State
from celery_idempotent.serializers import HTTP, Serializer
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import DefinedTask

logger = logging.getLogger(__name__)

#: Errors of the library's own that a record may have, with their codes for programs.
_OWN: Final[dict[type[BaseException], str]] = {
    errors.FailedByOperator: "failed_by_operator",
    errors.ProcessingTimedOut: "timed_out",
    errors.TooManyCrashes: "too_many_crashes",
}
_SERIALIZER: Final = Serializer()


def status_answer(
    app: Celery, namespace: str, key: str, caller: Callable[[], object], docs_url: str | None
) -> Answer:
    """Return the answer of the status resource about a key of the caller."""
    try:
        return _status_of(app, namespace, key, caller())
    except RequestRefused as refused:
        return refused.answer(docs_url)


def _status_of(app: Celery, namespace: str, key: str, scope: object) -> Answer:
    try:
        record = get_store(app).get(http_identity(namespace, scope, key))
    except errors.InvalidKey:
        record = None
    except errors.STORE_ERRORS as error:
        raise RequestRefused("store_unavailable", "Ask again later.") from error
    if record is None or record.uncommitted:
        # The same answer for a key that never existed, was forgotten, may be rolled back, or is another caller's.
        raise RequestRefused("unknown_key", "You have no such key, or its record has expired.")
    definition = definition_of(app, namespace, load=True)
    task: Any = None if definition is None else app.tasks[definition.name]
    described = describe(record, key=key, task=task)
    headers = [("Cache-Control", "private, no-cache"), *(() if described["settled"] else WAIT)]
    answer = json_answer(200, headers, described)
    answer.headers.append(("ETag", f'"{hashlib.sha256(answer.body).hexdigest()[:32]}"'))
    return answer


def describe(record: Record, *, key: str, task: DefinedTask | None) -> dict[str, Any]:
    """Return what the status resource says, for JSON, in an order for people."""
    state, members = record.state, dict[str, object]()
    if state is State.INTERRUPTED:
        members = {"retryable": True}
    elif state is State.COMPLETED:
        state, members = _result_of(record, task)
        try:
            json.dumps(members, default=as_text)
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
        "settled": state.is_final,
        "created_at": record.created_at,
        "updated_at": record.updated_at,
        "crashes": record.crashes,
        **members,
    }


def _result_of(record: Record, task: DefinedTask | None) -> tuple[State, dict[str, object]]:
    """Return the state and the result of a COMPLETED record: the task that replaced this one may still run."""
    value, definition = record.value, None if task is None else task.idempotency_definition()
    try:
        if value is not None and value.content_type == HTTP:
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
    except (errors.IdempotencyError, SerializationError, ContentDisallowed):
        pass  # unreadable
    except (AttributeError, NotImplementedError):
        pass  # there is no result backend
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
    final: tuple[type[BaseException], ...] = (errors.IdempotencyError,)
    kind: type[BaseException] | None
    text: object
    if definition is None:
        kind, text = _error_of_view(record)
    else:
        final = (*final, *definition.policy.permanent_errors)
        try:
            text = definition.codec.load_error(record.value)
        except errors.IdempotencyError as unreadable:
            text = unreadable
        kind = type(text)
    is_final = kind is not None and issubclass(kind, final)
    error = {"type": kind.__name__ if kind else ""}
    if is_final and text:
        error["message"] = str(text)
    return Failure(
        kind=kind,
        code=_OWN.get(kind, "task_failed") if kind else "task_failed",
        detail=error.get("message") or "The operation failed.",
        retryable=kind is not None and not is_final,
        error=error,
    )


def _error_of_view(record: Record) -> tuple[type[BaseException] | None, object]:
    """Return class and text of the error that a view's record has, which is the library's own."""
    found: object = None
    if record.value is not None:
        with contextlib.suppress(errors.IdempotencyError):
            found = _SERIALIZER.load(record.value)
    parts = found if isinstance(found, dict) else {}
    kind = next((each for each in _OWN if each.__name__ == parts.get("exc_type")), None)
    return kind, parts.get("exc_message", "")
