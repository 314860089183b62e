"""The page of one record: all that it says, for people.

Its timeline is made of what the record knows, which is not all that happened. What has no time stands where it must
have been::

    12:00:00   The key was first claimed
               Lost to a crash once               no time: the record only counts these
    12:05:12   Claimed by web-1:4711 (attempt 2)
    12:05:14   Turned away: somebody else held the key
    12:06:12   Its lease runs out, unless it is renewed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from celery_idempotent.celery.operations import Operation, is_live, offered
from celery_idempotent.operations.wording import intervention_in_words, time_in_words
from celery_idempotent.records import Record, State
from celery_idempotent.stores.refusals import KEPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """Something that happened to a record, or will; without ``at`` where the time was not recorded.

    ``task_id`` is who it happened to, where that is not the record's own task.
    """

    what: str
    at: datetime | None = None
    task_id: str = ""
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
    unknown: str
    steps: Sequence[tuple[str, int]]
    now: datetime

    @property
    def left(self) -> str:
        """The time until the lease runs out, in words; the page's script says the same and counts down."""
        left_ms = self.left_ms or 0
        text = time_in_words(abs(left_ms))
        return f"ran out {text} ago" if left_ms < 0 else f"{text} left"


def detail(record: Record, now_ms: int, *, known: bool = True) -> Detail:
    """Return what there is to say about a record at ``now_ms`` of the store's clock; ``known``: its task is."""
    # A host name has no colon but in IPv6. What follows the pid is a random id of the process.
    host, _, pid = record.worker.partition("/")[0].rpartition(":")
    return Detail(
        record=record,
        live=is_live(record, now_ms),
        stale=record.stale(now_ms),
        left_ms=None if record.deadline_ms is None else record.deadline_ms - now_ms,
        host=host,
        pid=pid,
        fingerprint=record.fingerprint.hex() if record.fingerprint else "",
        operations=offered(record, known=known),
        timeline=_timeline(record, now_ms),
        unknown=_not_recorded(record),
        steps=[(name, len(stored.body)) for name, stored in record.steps],
        now=datetime.fromtimestamp(now_ms / 1000, tz=timezone.utc),
    )


def _timeline(record: Record, now_ms: int) -> list[Moment]:
    """Return what a record knows to have happened, in its order; what has no time comes where it must have been."""
    dated = [
        Moment(at=refusal.at, what=_TURNED_AWAY[refusal.kind], task_id=refusal.task_id)
        for refusal in record.refusals
    ]
    # Of what happened within a millisecond: no conflict comes before the claim, none after the settle.
    conflicts = sum(refusal.kind == "conflict" for refusal in record.refusals)
    place = conflicts if record.state.settled else 0
    dated.sort(key=lambda moment: moment.what != _TURNED_AWAY["conflict"])
    dated.insert(place, Moment(at=record.updated_at, what=_became(record)))
    if record.deadline is not None and record.deadline_ms is not None:
        ahead = record.deadline_ms > now_ms
        what = "lease" if record.state is State.PROCESSING else "reservation"
        dated.append(
            Moment(
                at=record.deadline,
                what=f"Its {what} runs out, unless it is renewed"
                if ahead
                else f"Its {what} ran out",
                ahead=ahead,
            )
        )
    dated += [
        Moment(at=each.at, what=intervention_in_words(each))
        for each in record.interventions
        if each is not record.settled_by
    ]
    moments = [
        Moment(at=record.created_at, what=_began(record)),
        *_between(record),
        *sorted(dated, key=lambda moment: moment.at or record.updated_at),
    ]
    if record.delivered:
        moments.append(Moment(what="Its callbacks were sent"))
    return moments


_TURNED_AWAY = {
    "conflict": "Turned away: somebody else held the key",
    "mismatch": "Turned away: its arguments are not those of the first call",
}


def _began(record: Record) -> str:
    if record.reserved:
        return "Reserved: its message was about to be published"
    if record.state.settled:
        return "The key was first claimed or reserved"  # a settled record no longer tells
    return "The key was first claimed"


def _between(record: Record) -> list[Moment]:
    """Return what happened between the first claim and the present state, at times that were not recorded."""
    earlier = record.attempts - (record.state is State.PROCESSING)
    shown = 1 if record.state is State.INTERRUPTED else 0
    moments = []
    if earlier > 1 or (earlier == 1 and record.state is State.PROCESSING):
        before = " before" if record.state is State.PROCESSING else ""
        moments.append(Moment(what=f"Claimed {_recorded_times(earlier)}{before}"))
    if record.crashes > shown:
        before = " before" if shown else ""
        moments.append(
            Moment(what=f"Lost to a crash {_recorded_times(record.crashes - shown)}{before}")
        )
    return moments


def _recorded_times(count: int) -> str:
    # Redis counts in one byte.
    return {1: "once", 255: "255 times or more"}.get(count, f"{count} times")


def _not_recorded(record: Record) -> str:
    """Return what the timeline does not show."""
    missing = ["replays", "renewals", "sweeps that left it alone"]
    if record.attempts > 1 or record.crashes:
        missing.insert(0, "when earlier attempts began and ended")
    if len(record.refusals) == KEPT:
        missing.append("refusals before the last five")
    return f"Not kept: {', '.join(missing)}."


def _became(record: Record) -> str:
    if record.settled_by is not None:
        return intervention_in_words(record.settled_by)
    match record.state:
        case State.QUEUED if record.attempts:
            return "Queued again: its message is on its way once more"
        case State.QUEUED:
            return "Queued: its message is on its way"
        case State.PROCESSING:
            return f"Claimed by {record.worker or 'a worker'} (attempt {record.attempts})"
        case State.INTERRUPTED if record.crashes:
            return f"Interrupted (crash {record.crashes}): the next delivery may run it"
        case State.INTERRUPTED:
            return "Given back with steps done: the next delivery may run the rest"
        case State.COMPLETED if record.replaced:
            return "Completed: another task took over its task id"
        case State.COMPLETED:
            return "Completed: whoever asks again gets this result"
        case State.FAILED:
            return "Failed for good: whoever asks again gets this error"
