"""Settling records that no worker runs: what the sweep and operators write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from celery_idempotent.celery.registry import definition_of
from celery_idempotent.errors import IdempotencyError, InvalidOption
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.records import Record, SettleRequest, State, Stored
from celery_idempotent.serializers import NotStored, Serializer

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores.base import Store


def fail_record(
    app: Celery,
    store: Store,
    record: Record,
    error: IdempotencyError,
    *,
    note: str = "",
) -> bool:
    """Settle a record FAILED that no worker runs; ``False`` if it was claimed, or has ended otherwise, meanwhile."""
    definition = definition_of(app, record.identity.namespace)
    keep_ms = Policy().settled_keep_ms if definition is None else definition.policy.settled_keep_ms
    value = _plain_error(app, error) if definition is None else definition.codec.dump_error(error)
    return end_record(
        store,
        SettleRequest(
            record=record,
            state=State.FAILED,
            value=value,
            keep_ms=keep_ms,
            restore=False,
            swept=not note,
            note=note,
        ),
    )


def end_record(store: Store, end: SettleRequest) -> bool:
    """Settle a record that no worker runs, as it was seen; ``False`` if it has changed, or has ended otherwise.

    The end is not to be restored: a key that was claimed and released a moment ago has no record, and is not to be
    settled for what it was before.
    """
    # One write, to the record with this token and to no other.
    settled, found = store.settle(end), store.get(end.record.identity)
    if found is None or (found.state, found.value) != (end.state, end.value):
        return False  # its owner may have settled it first, and then that end state stays
    # An operator's settle gives a new token: asked again because the answer was lost, it finds its own note.
    return found.note == end.note if end.note else settled and found.token == end.record.token


def _plain_error(app: Celery, error: IdempotencyError) -> Stored | None:
    """Serialize the error of a record whose task is unknown, or that is a view's, as a result backend would."""
    accept = tuple(app.conf.result_accept_content or app.conf.accept_content)
    plain = {
        "exc_type": type(error).__name__,
        "exc_module": type(error).__module__,
        "exc_message": str(error),
    }
    try:
        stored = Serializer("json", accept).dump(plain, max_bytes=None)
    except InvalidOption:  # not readable by anyone
        return None
    return None if isinstance(stored, NotStored) else stored
