"""What each verb makes of a record: pure functions, for a store that decides in Python."""

from __future__ import annotations

from dataclasses import dataclass, replace

from celery_idempotent.records import Held, Mismatched, Record, Settled, State, Stored

__all__ = [
    "Kept",
    "Refusal",
    "add_step",
    "claimed",
    "given_back",
    "interrupted",
    "requeued",
    "reserved",
    "settled",
    "swept",
]

#: What a claim and a reservation answer when they cannot have the key.
Refusal = Held | Settled | Mismatched

#: A deadline doubles no more often than that: from a minute to 17 hours.
_DOUBLINGS = 10


@dataclass(frozen=True, slots=True)
class Kept:
    """A record and what only its store knows about it: ``attempt`` is the id of who wrote it last."""

    record: Record
    expires_ms: int
    attempt: bytes = b""
    requeues: int = 0


def _refusal(old: Record, fingerprint: bytes | None, now_ms: int) -> Refusal | None:
    """Return why nobody can have the key, ``None`` if that is a matter of leases and deadlines."""
    if old.fingerprint is not None and fingerprint is not None and old.fingerprint != fingerprint:
        return Mismatched(old)
    if old.state.settled:
        return Settled(old, age_ms=max(now_ms - old.updated_ms, 0))
    return None


def claimed(kept: Kept | None, new: Record, attempt: bytes, now_ms: int) -> Record | Refusal:
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
    if processing and not old.stale(now_ms):
        return Held(old, left_ms=_left(old, now_ms))
    return replace(
        new,
        created_ms=old.created_ms,
        crashes=old.crashes + processing,
        attempts=old.attempts + 1,
        fingerprint=new.fingerprint if new.fingerprint is not None else old.fingerprint,
        reserved=old.reserved,
        steps=old.steps,
    )


def reserved(kept: Kept | None, new: Record, attempt: bytes, now_ms: int) -> Record | Refusal:
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
            return replace(old, deadline_ms=new.deadline_ms, reserved=True)
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


def add_step(old: Record, name: str, value: Stored) -> Record:
    """Return the record with the step, whose first result stays."""
    if any(known == name for known, _ in old.steps):
        return old
    return replace(old, steps=(*old.steps, (name, value)))


def given_back(kept: Kept, requeue_ms: int | None, now_ms: int) -> Kept | None:
    """Return what a release leaves, if anything."""
    old = kept.record
    if requeue_ms is not None and old.reserved:
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
    return Kept(record, kept.expires_ms + delay_ms, requeues=kept.requeues + 1)


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
