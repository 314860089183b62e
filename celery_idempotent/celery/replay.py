"""Answering a duplicate from the record: its value, its exception, or what its task left in the result backend.

Who sends the callbacks of a message depends on which message settled the record::

    this very message, and they are sent        answer; Celery finds no callbacks
    this very message, and it died before       answer, send its callbacks, mark the record as delivered
    another message with the same key           answer, send its own callbacks: it is in a chain or chord of its own
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from celery.backends.base import DisabledBackend
from celery.exceptions import Ignore

from celery_idempotent.celery import delivery, republish
from celery_idempotent.celery.definition import Definition
from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.records import Record

if TYPE_CHECKING:
    from celery.app.task import Context

    from celery_idempotent.celery.task import IdempotentTask

#: For so long, at most, a chord is claimed by the process that is to publish its body (with defaults: 21 s).
_CHORD_CLAIM_MS = 25_000


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
        raise Ignore(f"{record.identity} is carried on by the task that replaced this one")
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
    return bool(unstored) and not delivery.brings_callbacks(request)


def _expect(task: IdempotentTask, request: Context, record: Record, age_ms: int) -> None:
    """Have the record marked when Celery has sent the callbacks of this message.

    A complete chord may have lost the process that was to publish its body. Celery >= 5.7 lets no other process do so
    while the claim of the first lasts, and the part would be returned in vain::

        process A   the last part ─ claims the chord ─ ✗ SIGKILL
        process B                        the same part ─ not its claim ─ waits until the claim is over
    """
    own = record.task_id == request.id
    if not delivery.brings_callbacks(request) or (own and record.delivered):
        return
    left_ms = _CHORD_CLAIM_MS - age_ms
    if own and request.chord and left_ms > 0 and not request.is_eager:
        republish.after_chord_claim(task, request, left_ms)
    mark = partial(delivery.mark, task.app, record.identity) if own else _mark_nothing
    delivery.note_due(task, str(request.id), mark, record.token, record.state, age_ms)


def _mark_nothing(token: int) -> None:
    """A duplicate under another task id did not settle the record."""


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
