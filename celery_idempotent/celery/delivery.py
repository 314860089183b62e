"""What a finished task has to send (links, the next step of a chain, its part of a chord), and whether it was sent.

A worker may die between the settle and the sending, or between the sending and the ack. The message then comes back,
finds its own record settled, and must send in the first case and be silent in the second. So the record is marked as
*delivered* once everything was sent, in a third round trip that only requests with something to send pay for::

    run ─ settle ─┬─ ✗ ······················· redelivered: answered in full, sent
                  └─ links, chain, result, chord part ─ mark ─┬─ ✗ ···· redelivered: answered silently
                                                              └─ ack
    between the sending and the mark: sent twice, under the same ids, so that an IdempotentTask downstream runs once
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery.canvas import maybe_signature
from celery.exceptions import Ignore
from celery.utils.functional import maybe_list

from celery_idempotent.celery.typed import Sig
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.identity.stamp import as_mapping, read_stamp
from celery_idempotent.identity.trees import AnySignature, Place, with_tasks
from celery_idempotent.records import Identity, State

if TYPE_CHECKING:
    from celery import Celery
    from celery.app.task import Context

    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: In a stamp: how often its message came back because something could not be sent; what was sent is no longer in it.
UNDELIVERED = "undelivered"

#: The attribute of a request that holds its :class:`Due`.
_DUE = "idempotency_due"


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """A record was settled ``age_ms`` ago, and what this request sends is still to be sent; then ``mark`` notes it."""

    mark: Callable[[], None]
    age_ms: int = 0


def forget_function(store: Store, identity: Identity, token: int) -> Callable[[], None]:
    """Return the function that forgets a task's record, for when its replacement can never be published."""

    def forget() -> None:
        try:
            store.forget(identity, token=token, state=State.COMPLETED)
        except IdempotencyError as error:
            logger.warning("idempotency: could not free %s: %s", identity, error)

    return forget


class Replaced(Ignore):
    """The task is replaced: to publish ``signature``, under its task id, is due. ``free`` gives the key back."""

    def __init__(self, signature: Sig, due: Due, free: Callable[[], None]) -> None:
        super().__init__("Replaced by new task")
        self.signature = signature
        self.due = due
        self.free = free


def brings_callbacks(request: Context) -> bool:
    """Does this request have callbacks: links, errbacks, a chain or a chord?"""
    return bool(request.callbacks or request.errbacks or request.chain or request.chord)


def has_to_send(request: Context, said: Mapping[str, object] | None = None) -> bool:
    """Does this request have anything to send when it is done?

    Its callbacks; or it had some, sent a part of them, and came back for the mark (:data:`UNDELIVERED` in its stamp).
    ``said`` is its stamp, where that is read already.
    """
    if said is None:
        said = read_stamp(as_mapping(request.headers), request.id)
    return brings_callbacks(request) or UNDELIVERED in said


def drop_callbacks(request: Context) -> None:
    """Let Celery send nothing for this request: all of it was sent before."""
    request.callbacks = request.errbacks = request.chain = request.chord = None


def note_due(request: Context, due: Due) -> None:
    """Remember that something is to be sent."""
    setattr(request, _DUE, due)


def take_due(request: Context) -> Due | None:
    """Return what is due, once."""
    due: Due | None = vars(request).pop(_DUE, None)
    return due


def mark_function(store: Store, identity: Identity, token: int) -> Callable[[], None]:
    """Return the function that marks this record as delivered: its callbacks are sent."""

    def mark() -> None:
        try:
            store.mark_delivered(identity, token=token)
        except Exception as error:  # noqa: BLE001  a soft time limit as well: all of it is done
            logger.warning(
                "idempotency: %s is done and its callbacks are sent, which could not be noted: should its message "
                "come back, they are sent again, under the same ids: %s",
                identity,
                error,
            )

    return mark


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
