"""What each verb makes of a record: pure functions, for a store that decides in Python."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from celery_idempotent.records import (
    Held,
    Mismatched,
    Record,
    Refusal,
    RefusalKind,
    Settled,
    State,
    Stored,
)
from celery_idempotent.stores.refusals import with_refusal

__all__ = [
    "Denial",
    "Kept",
    "add_step",
    "claimed",
    "given_back",
    "interrupted",
    "may_requeue",
    "refused",
    "requeued",
    "reserved",
    "settled",
    "swept",
]

#: What a claim and a reservation answer when they cannot have the key.
Denial = Held | Settled | Mismatched

#: A deadline doubles no more often than that: from a minute to 17 hours.
_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class Kept:
    """A record and what only its store knows about it: ``attempt`` is the id of who wrote it last.

    The record is without its ``refusals``, which are here.
    """

    record: Record
    expires_ms: int
    attempt: bytes = b""
    requeues: int = 0
    refusals: tuple[Refusal, ...] = ()


def _refusal(old: Record, fingerprint: bytes | None, now_ms: int) -> Denial | None:
    """Return why nobody can have the key, ``None`` if that is a matter of leases and deadlines."""
    if old.fingerprint is not None and fingerprint is not None and old.fingerprint != fingerprint:
        return Mismatched(old)
    if old.state.settled:
        return Settled(old, age_ms=max(now_ms - old.updated_ms, 0))
    return None


def claimed(
    kept: Kept | None,
    new: Record,
    attempt: bytes,
    now_ms: int,
    unanswered: Sequence[bytes] = (),
) -> Record | Denial:
    """Return the claim with what it takes over from the old record, its token only if it holds."""
    if kept is None:
        return new
    old = kept.record
    refusal = _refusal(old, new.fingerprint, now_ms)
    if refusal is not None:
        return refusal
    processing = old.state is State.PROCESSING
    if processing and kept.attempt == attempt:
        return replace(old, deadline_ms=new.deadline_ms)
    begun = processing and kept.attempt not in unanswered
    if begun and not old.stale(now_ms):
        return Held(old, left_ms=_left(old, now_ms))
    return replace(
        new,
        created_ms=old.created_ms,
        crashes=old.crashes + begun,
        attempts=old.attempts + 1,
        fingerprint=new.fingerprint if new.fingerprint is not None else old.fingerprint,
        reserved=old.reserved,
        steps=old.steps,
    )


def reserved(kept: Kept | None, new: Record, attempt: bytes, now_ms: int) -> Record | Denial:
    """Return the reservation with what it takes over, its token only if it was made before."""
    if kept is None:
        return new
    old = kept.record
    refusal = _refusal(old, new.fingerprint, now_ms)
    if refusal is not None:
        return refusal
    if old.state is State.PROCESSING:
        return Held(old, left_ms=_left(old, now_ms))
    if old.state is State.QUEUED:
        if kept.attempt == attempt or old.task_id == new.task_id:
            message = new.message if old.task_id == new.task_id else None
            return replace(
                old,
                deadline_ms=new.deadline_ms,
                reserved=True,
                message=old.message if message is None else message,
            )
        if left_ms := _left(old, now_ms):
            return Held(old, left_ms=left_ms)
        # Its sender died before it published: the message goes out under the same task id.
        new = replace(
            new,
            task_id=old.task_id,
            worker=old.worker,
            on_stale=old.on_stale,
            message=old.message,
        )
    return replace(
        new,
        created_ms=old.created_ms,
        crashes=old.crashes,
        attempts=old.attempts,
        fingerprint=new.fingerprint if new.fingerprint is not None else old.fingerprint,
        steps=old.steps,
    )


def settled(
    record: Record,
    kept: Kept | None,
    *,
    state: State,
    value: Stored | None,
    replaced: bool,
    now_ms: int,
) -> Record:
    """Return the end state of a claim, with what happened since and nothing of the run itself."""
    if kept is not None:
        old = kept.record
        record = replace(
            record, crashes=old.crashes, attempts=old.attempts, created_ms=old.created_ms
        )
    return Record(
        identity=record.identity,
        state=state,
        token=record.token,
        created_ms=record.created_ms,
        updated_ms=now_ms,
        crashes=record.crashes,
        attempts=record.attempts,
        fingerprint=record.fingerprint,
        task_id=record.task_id,
        value=value,
        replaced=replaced,
    )


def refused(kept: Kept, kind: RefusalKind, task_id: str, now_ms: int) -> Kept:
    """Return the record with a note of who could not have its key."""
    return replace(kept, refusals=with_refusal(kept.refusals, kind, task_id, now_ms))


def add_step(old: Record, name: str, value: Stored) -> Record:
    """Return the record with the step, whose first result stays."""
    if any(known == name for known, _ in old.steps):
        return old
    return replace(old, steps=(*old.steps, (name, value)))


def given_back(kept: Kept, requeue_ms: int | None, now_ms: int) -> Kept | None:
    """Return what a release leaves, if anything."""
    old = kept.record
    if requeue_ms is not None and (old.reserved or old.message is not None):
        record = replace(
            old, state=State.QUEUED, updated_ms=now_ms, deadline_ms=now_ms + requeue_ms
        )
        return replace(kept, record=record, expires_ms=kept.expires_ms + requeue_ms)
    if old.steps:
        return interrupted(kept, now_ms, crashes=0)
    return None


def interrupted(kept: Kept, now_ms: int, *, crashes: int = 1) -> Kept:
    """Return the record as a crash leaves it, for as long as it would have lived."""
    record = replace(
        kept.record,
        state=State.INTERRUPTED,
        crashes=kept.record.crashes + crashes,
        updated_ms=now_ms,
        deadline_ms=None,
    )
    return replace(kept, record=record)


def may_requeue(old: Record, token: int | None, now_ms: int) -> bool:
    """May an operator have this record queued? With its token also one whose lease has not run out."""
    if token is None:
        return old.state is State.INTERRUPTED or old.stale(now_ms)
    return old.token == token and old.state in (State.INTERRUPTED, State.PROCESSING)


def requeued(kept: Kept, delay_ms: int, now_ms: int) -> Kept | None:
    """Return the record as it waits for its message to be published, ``None`` if it has none.

    It lives as much longer as its deadline is away.
    """
    old = kept.record
    if old.message is None:
        return None
    record = replace(
        old,
        state=State.QUEUED,
        crashes=old.crashes + (old.state is State.PROCESSING),
        updated_ms=old.updated_ms if old.state is State.QUEUED else now_ms,
        deadline_ms=now_ms + delay_ms,
    )
    return replace(
        kept,
        record=record,
        expires_ms=kept.expires_ms + delay_ms,
        attempt=b"",
        requeues=kept.requeues + 1,
    )


def swept(kept: Kept, requeue_ms: int, now_ms: int) -> Kept | None:
    """Return what a sweep makes of a record whose time has come, ``None`` if it leaves it."""
    old = kept.record
    if old.state is State.QUEUED or old.on_stale == "requeue":
        after = requeued(kept, requeue_ms * 2 ** min(kept.requeues, _DOUBLINGS), now_ms)
        if after is not None or old.state is State.QUEUED:
            return after
    return interrupted(kept, now_ms)


def _left(record: Record, now_ms: int) -> int:
    """Return how long the lease or the reservation still lasts, at least 0."""
    assert record.deadline_ms is not None
    return max(record.deadline_ms - now_ms, 0)
