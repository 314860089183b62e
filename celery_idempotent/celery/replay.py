"""Answering a duplicate from the record: its value, its exception, or what its task left in the result backend.

Who sends the callbacks of a message depends on which message settled the record::

    this very message, and they are sent        answer; Celery finds no callbacks
    this very message, and it died before       answer, send its callbacks, mark the record as delivered
    another message with the same key           answer, send its own callbacks: it is in a chain or chord of its own
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore

from celery_idempotent.celery import delivery, republish
from celery_idempotent.celery.definition import Definition
from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.records import Record
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery.app.task import Context

    from celery_idempotent.celery.task import IdempotentTask


def replay(
    task: IdempotentTask, definition: Definition, request: Context, record: Record, age_ms: int
) -> object:
    """Answer from the record: return its value or raise its exception.

    A redelivery of the very message that settled it sends the callbacks that the first delivery did not; any other
    duplicate is a link of its own chain, a member of its own chord.
    """
    own = record.task_id == request.id
    if own and record.delivered:
        delivery.drop_callbacks(request)
    if record.state.is_failure:
        error = definition.codec.load_error(record.value)
        _expect(task, request, record, age_ms)
        raise error
    if record.replaced and own:
        if record.delivered or record.value is None:
            raise Ignore(f"{record.identity} is carried on by the task that replaced this one")
        signature = definition.codec.load_replacement(record.value)
        free = delivery.forget_function(get_store(task.app), record.identity, record.token)
        raise delivery.Replaced(signature, _due(task, record, age_ms), free)
    if record.value is not None and not record.replaced:
        value = definition.codec.load_value(record.value)
    elif own and not record.replaced and _is_unused(task, request):
        return None
    else:
        value = _from_backend(task, request, record, age_ms)
    _expect(task, request, record, age_ms)
    return value


def _is_unused(task: IdempotentTask, request: Context) -> bool:
    """Is the result of this message neither stored nor handed on?"""
    unstored = request.ignore_result or isinstance(task.backend, DisabledBackend)
    return bool(unstored) and not delivery.has_to_send(request)


def _expect(task: IdempotentTask, request: Context, record: Record, age_ms: int) -> None:
    """Have sent what this message sends. A duplicate under another id marks nothing: it did not settle the record."""
    if not delivery.has_to_send(request) or (record.delivered and record.task_id == request.id):
        return
    due = _due(task, record, age_ms)
    if record.task_id != request.id:
        due = replace(due, mark=_nothing)
    delivery.note_due(request, due)


def _due(task: IdempotentTask, record: Record, age_ms: int) -> delivery.Due:
    mark = delivery.mark_function(get_store(task.app), record.identity, record.token)
    return delivery.Due(mark=mark, age_ms=age_ms)


def _nothing() -> None:
    pass


def _from_backend(task: IdempotentTask, request: Context, record: Record, age_ms: int) -> object:
    """Look for a result that is not in the record where its task left it."""
    if isinstance(task.backend, DisabledBackend):
        state, value = "", None
    else:
        first = task.AsyncResult(record.task_id)
        state, value = first.state, first.result
    if state == "SUCCESS":
        return value
    if state == "FAILURE" and isinstance(value, Exception):
        raise value
    wait_ms = _longest_wait_ms(task) if record.replaced else task.idempotency_policy.lease_ms
    if state and age_ms < wait_ms and record.task_id != request.id:
        republish.conflict(task, request, record, task.idempotency_policy.lease_ms)
    raise ResultUnavailable(
        f"{record.identity} was completed by task {record.task_id}, but its result was not kept in the record "
        "and is not in the result backend."
    )


def _longest_wait_ms(task: IdempotentTask) -> int:
    """Return how long a duplicate waits for the result of a replacement.

    That may take its time, or ignore its result. But once the record is gone, the duplicate would run.
    """
    longest = task.idempotency_policy.settled_keep_ms // 2
    expires = getattr(task.backend, "expires", None)
    return min(longest, int(expires * 1000)) if expires else longest
