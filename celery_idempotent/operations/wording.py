"""Times and names as people read them."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from typing import TYPE_CHECKING

from celery_idempotent.records import Record

if TYPE_CHECKING:
    from celery_idempotent.celery.redelivery import RedeliveryTimeout

#: What came of a call under another task id that was refused, as its task's idempotency_on_conflict says.
REFUSED = {
    "retry": "it went back to the queue, to try again",
    "wait": "it was to wait for its end, and to go back to the queue if that took too long",
    "ignore": "it was dropped (idempotency_on_conflict)",
    "raise": "it failed with InProgress",
}

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)


def iso(ms: int | None) -> str | None:
    """Return a time in ISO 8601, in UTC."""
    if ms is None:
        return None
    return f"{(_EPOCH + timedelta(milliseconds=ms)).isoformat(timespec='milliseconds')[:-6]}Z"


def time_in_words(ms: int) -> str:
    """Return a length of time in its two largest units."""
    seconds = ms // 1000
    parts: list[str] = []
    for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1)):
        count, seconds = divmod(seconds, size)
        if count or (unit == "s" and not parts):
            parts.append(f"{count} {unit}")
    return " ".join(parts[:2])


def ago(ms: int, now_ms: int) -> str:
    """Return how far a time is away."""
    words = time_in_words(abs(now_ms - ms))
    return f"in {words}" if ms > now_ms else f"{words} ago"


def moment(ms: int, now_ms: int) -> str:
    """Return a time, and how far away it is."""
    at = _EPOCH + timedelta(milliseconds=ms)
    return f"{at:%Y-%m-%d %H:%M:%S} UTC ({ago(ms, now_ms)})"


def times(count: int) -> str:
    """Return how often something was; Redis counts in one byte."""
    return {1: "once", 2: "twice", 255: "255 times or more"}.get(count, f"{count} times")


def holder(record: Record, kind: str = "task") -> str:
    """Return which task (or what ``kind`` says), on which machine and in which process, claimed a key last."""
    # A host name has no colon but in IPv6. What follows the pid tells machines of one name apart, for machines.
    host, _, pid = record.worker.partition("/")[0].rpartition(":")
    task = f"{kind} {record.task_id}" if record.task_id else f"a {kind}"
    return f"{task} on {host}, pid {pid}" if host else task


def redelivery_in_words(broker: RedeliveryTimeout | None) -> str:
    """Return when the broker delivers the message of a lost worker again."""
    if broker is None:
        return "The broker delivers its message again once the connection of its worker is gone."
    after = f"{broker.seconds:g} s after it was taken ({broker.option})"
    return f"The broker delivers its message again {after}, or later."
