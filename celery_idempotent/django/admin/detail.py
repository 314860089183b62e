"""The page of one record: all that it says, told to people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from celery_idempotent.operations import Operation, is_live, offered
from celery_idempotent.records import Record, State

__all__ = ["Detail", "Moment", "detail", "duration"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened to a record, or will."""

    at: datetime
    what: str
    ahead: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Detail:
    """What the page of a record shows beside the record itself.

    ``left_ms`` until the lease or the reservation runs out (below zero: since), for those that have an end.
    """

    record: Record
    live: bool
    stale: bool
    left_ms: int | None
    host: str
    pid: str
    fingerprint: str
    operations: tuple[Operation, ...]
    timeline: Sequence[Moment]
    steps: Sequence[tuple[str, int]]
    now: datetime

    @property
    def left(self) -> str:
        """The time until the lease runs out, in words; the page's script says the same and counts down."""
        left_ms = self.left_ms or 0
        text = duration(abs(left_ms))
        return f"ran out {text} ago" if left_ms < 0 else f"{text} left"


def detail(record: Record, now_ms: int) -> Detail:
    """Return what there is to say about a record at ``now_ms`` of the store's clock."""
    # A host name has no colon but in IPv6, and the pid comes last.
    host, _, pid = record.worker.rpartition(":")
    return Detail(
        record=record,
        live=is_live(record, now_ms),
        stale=record.stale(now_ms),
        left_ms=None if record.deadline_ms is None else record.deadline_ms - now_ms,
        host=host,
        pid=pid,
        fingerprint=record.fingerprint.hex() if record.fingerprint else "",
        operations=offered(record),
        timeline=_timeline(record, now_ms),
        steps=[(name, len(stored.body)) for name, stored in record.steps],
        now=_EPOCH + timedelta(milliseconds=now_ms),
    )


def duration(ms: int) -> str:
    """Return a time in its two largest units."""
    seconds = ms // 1000
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def _timeline(record: Record, now_ms: int) -> list[Moment]:
    """Return the moments that a record knows of, in their order."""
    moments = [
        Moment(
            at=record.created_at,
            what="Reserved: its message was about to be published"
            if record.reserved
            else "The key was first claimed",
        ),
        Moment(at=record.updated_at, what=_became(record)),
    ]
    if record.deadline is not None and record.deadline_ms is not None:
        ahead = record.deadline_ms > now_ms
        what = "lease" if record.state is State.PROCESSING else "reservation"
        moments.append(
            Moment(
                at=record.deadline,
                what=f"Its {what} runs out, unless it is renewed"
                if ahead
                else f"Its {what} ran out",
                ahead=ahead,
            )
        )
    return sorted(moments, key=lambda moment: moment.at)


def _became(record: Record) -> str:
    match record.state:
        case State.QUEUED:
            return "Queued: its message is on its way"
        case State.PROCESSING:
            return f"Claimed by {record.worker or 'a worker'} (attempt {record.attempts})"
        case State.INTERRUPTED:
            return f"Interrupted (crash {record.crashes}): the next delivery may run it"
        case State.COMPLETED if record.replaced:
            return "Completed: another task took over its task id"
        case State.COMPLETED:
            return "Completed: whoever asks again gets this result"
        case State.FAILED:
            return "Failed for good: whoever asks again gets this error"
