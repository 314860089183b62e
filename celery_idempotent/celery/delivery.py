"""The callbacks of a finished task (links, chain, chord part, errbacks), and the mark that they were sent.

Celery sends all of them after the run. A worker may die before that, and then the message comes back and finds its own
record settled. So the record is marked as *delivered* when Celery reports the end of the task, its last step::

    run ─ settle ─┬─ ✗ ······················ redelivered: answered in full, Celery sends
                  └─ Celery: links, chain, result, chord part, task_success ─ mark ─┬─ ✗ ── redelivered: silent
                                                                                    └─ ack
    between the sending and the mark: sent twice, under ids made from the parent's, so it takes effect once
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from celery.canvas import maybe_signature
from celery.utils.functional import maybe_list

from celery_idempotent.celery import republish
from celery_idempotent.celery.typed import Sig
from celery_idempotent.identity.trees import AnySignature, Place, with_tasks
from celery_idempotent.records import Identity, State
from celery_idempotent.stores import get_store

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

    from celery_idempotent.celery.task import IdempotentTask

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """The record of a delivery is settled as ``state``, and Celery has still to send its callbacks.

    ``mark`` notes that it did. ``publish_again`` has the message come back with a countdown, until ``give_up``
    (monotonic): for so long its record will surely be there to answer it.
    """

    task: IdempotentTask
    task_id: str
    state: State
    mark: Callable[[], None]
    publish_again: Callable[[], bool]
    acks_late: bool
    give_up: float


#: The callbacks that are due, of the delivery that was settled last.
current_due: ContextVar[Due | None] = ContextVar("idempotency_due", default=None)


def brings_callbacks(request: Context) -> bool:
    """Does this request have links, errbacks, a chain or a chord?"""
    return bool(request.callbacks or request.errbacks or request.chain or request.chord)


def drop_callbacks(request: Context) -> None:
    """Let Celery send nothing for this request: all of it was sent before."""
    request.callbacks = request.errbacks = request.chain = request.chord = None


def note_due(
    task: IdempotentTask,
    task_id: str,
    mark: Callable[[int], None],
    token: int,
    state: State,
    age_ms: int = 0,
) -> None:
    """Remember that the record of this token is to be marked when Celery is done with this delivery."""
    request = task.request
    # An eager call has no message.
    left_ms = 0 if request.is_eager else task.idempotency_policy.settled_keep_ms // 2 - age_ms
    chain = list(request.chain or ())  # the tracer of Celery < 5.7 takes its last step out
    due = Due(
        task=task,
        task_id=task_id,
        state=state,
        mark=partial(mark, token),
        publish_again=partial(republish.come_back, task, request, chain),
        acks_late=bool(task.acks_late),
        give_up=time.monotonic() + left_ms / 1000,
    )
    current_due.set(due)


def mark_success(sender: IdempotentTask, **_: object) -> None:
    """Mark the record of a task whose callbacks Celery has sent (``task_success``)."""
    _mark_ended(sender, State.COMPLETED)


def mark_failure(sender: IdempotentTask, **_: object) -> None:
    """Mark the record of a task whose errbacks Celery has sent (``task_failure``).

    Celery sends this signal also if a body returned and its callbacks could not be sent: the record is COMPLETED then,
    and stays undelivered.
    """
    _mark_ended(sender, State.FAILED)


def _mark_ended(task: IdempotentTask, state: State) -> None:
    due = current_due.get()
    if due is not None and due.task_id == task.request.id and due.state is state:
        current_due.set(None)
        due.mark()


def mark(app: Celery, identity: Identity, token: int) -> None:
    """Mark a record as delivered; if that fails, its callbacks may be sent once more."""
    try:
        get_store(app).mark_delivered(identity, token=token)
    except Exception as error:  # noqa: BLE001  a soft time limit as well: all of it is done
        logger.warning(
            "idempotency: %s is done and its callbacks are sent, which could not be noted: should its message "
            "come back, they are sent again, under the same ids: %s",
            identity,
            error,
        )


def derive_ids(app: Celery, links: Sig | Sequence[Sig], parent_id: str, kind: str) -> object:
    """Return ``links`` with task ids made from the parent's id where they have none.

    Celery gives a callback a new id each time it sends it; with these a callback that a crash made it send twice has
    the same id both times.
    """

    def with_id(task: AnySignature, place: Place) -> AnySignature:
        options = task.get("options") or {}
        path = "/".join(map(str, (parent_id, kind, *place)))
        task_id = options.get("task_id") or str(uuid.uuid5(uuid.NAMESPACE_URL, path))
        return {**task, "options": {**options, "task_id": task_id}}

    derived = [
        maybe_signature(with_tasks(link, with_id, (index,)), app=app)
        for index, link in enumerate(maybe_list(links) or [])
    ]
    return derived or links
