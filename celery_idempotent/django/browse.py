"""What operators see of a database: lists in bounded steps, counts, and counters by the hour."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery_idempotent.django.connections import Session
from celery_idempotent.django.rows import LETTERS, record_of, summary_columns
from celery_idempotent.records import Counted, Page, Selection, State, Stats
from celery_idempotent.stores.base import COUNTED_HOURS

__all__ = ["browse", "clock_ms", "count", "counts", "stats"]

#: Of these there is a lease row each, and so an index.
_INDEXED = frozenset(State) - {State.COMPLETED}
_HOUR_MS = 3_600_000
#: So many leases of a kind are counted: joining more of them with their records takes seconds.
COUNTED = 10_000

_COUNTER = "celery_idempotent_counter"


def browse(
    session: Session, selection: Selection, *, cursor: str, limit: int, look_at: int
) -> Page:
    """Return about ``limit`` records from ``cursor`` on: newest first, or by lease."""
    indexed = selection.wanted <= _INDEXED
    kind, column = ("l", "l.digest") if indexed else ("r", "r.id")
    after = _read(cursor, kind)
    now_ms = clock_ms(session)
    # What is looked at: a stretch of the index. What is shown: all of that which is selected.
    if indexed:
        stretch = "SELECT digest FROM celery_idempotent_lease"
        if after:
            stretch += " WHERE digest > %s"
        stretch += " ORDER BY digest LIMIT %s"
        rest = (
            " JOIN celery_idempotent_lease l ON l.digest = w.digest"
            " JOIN celery_idempotent_record r ON r.digest = l.digest AND r.token = l.token"
        )
        order = "l.digest"
    else:
        stretch = "SELECT id FROM celery_idempotent_record"
        if after:
            stretch += " WHERE id < %s"
        stretch += " ORDER BY id DESC LIMIT %s"
        rest = (
            " JOIN celery_idempotent_record r ON r.id = w.id"
            " LEFT JOIN celery_idempotent_lease l ON l.digest = r.digest AND l.token = r.token"
        )
        order = "r.id DESC"
    start: list[object] = [*([after] if after else []), look_at]
    condition, params = _condition(selection, now_ms)
    found = session.rows(
        f"SELECT {column}, {summary_columns(session.words)} FROM ({stretch}) w{rest}"
        f" WHERE {condition} ORDER BY {order} LIMIT %s",
        (*start, *params, limit),
    )
    looked_at, end = _stretch(session, stretch, start, indexed=indexed)
    if len(found) == limit:
        end = found[-1][0]
    elif looked_at < look_at:
        end = None
    records = [record_of(row[1:]) for row in found]
    return Page(
        records=tuple(replace(each, value=None, message=None, steps=()) for each in records),
        cursor="" if end is None else f"{kind}:{end if kind == 'r' else bytes(end).hex()}",
        looked_at=looked_at,
        now_ms=now_ms,
    )


def stats(session: Session) -> Stats:
    """Count what has a lease row, of each kind no more than :data:`COUNTED`: the index finds them by their due time."""
    now_ms = clock_ms(session)
    counts: Counter[str] = Counter()
    cut: set[str] = set()
    for condition, params, names in (
        ("due_ms <= %s", [now_ms], {"stale"}),
        ("due_ms > %s", [now_ms], {"live"}),
        # What no sweep has to look at: all that FAILED, and a reservation whose message nobody keeps.
        ("due_ms IS NULL", [], {"failed", "live", "stale"}),
    ):
        found = session.rows(
            # A subquery, not a join: that might read all records for a few leases.
            "SELECT state, past, valid, count(*) FROM (SELECT w.state, w.deadline_ms <= %s AS past,"
            " w.expires_ms > %s AND EXISTS (SELECT 1 FROM celery_idempotent_record r"
            " WHERE r.digest = w.digest AND r.token = w.token AND r.state = w.state) AS valid FROM"
            " (SELECT digest, token, state, deadline_ms, expires_ms FROM celery_idempotent_lease"
            f" WHERE {condition} LIMIT %s) w) v GROUP BY 1, 2, 3",
            (now_ms, now_ms, *params, COUNTED + 1),
        )
        for letter, past, valid, number in found:
            if valid and letter == LETTERS[State.FAILED]:
                counts["failed"] += number
            elif valid and letter != LETTERS[State.INTERRUPTED]:
                counts["stale" if past else "live"] += number
        if sum(row[-1] for row in found) > COUNTED:
            cut |= names
    cut |= {name for name, number in counts.items() if number > COUNTED}
    return Stats(
        live=min(counts["live"], COUNTED),
        stale=min(counts["stale"], COUNTED),
        failed=min(counts["failed"], COUNTED),
        now_ms=now_ms,
        at_least=frozenset(cut),
    )


def count(session: Session, outcomes: Mapping[tuple[str, str], int]) -> None:
    """Add to the counters of this hour, and drop those of the hour that is too long ago."""
    hour = clock_ms(session) // _HOUR_MS
    with session.transaction():
        # In one order, so that two who count the same never wait for each other.
        for (task, outcome), number in sorted(outcomes.items()):
            session.write(
                f"INSERT INTO {_COUNTER} (hour, task, outcome, count) VALUES (%s, %s, %s, %s)"
                + session.words.or_add,
                (hour, task[:255], outcome[:32], number),
            )
    session.write(f"DELETE FROM {_COUNTER} WHERE hour <= %s", (hour - COUNTED_HOURS,))


def counts(session: Session, *, hours: int) -> Sequence[Counted]:
    """Return the counters of the last hours."""
    first = clock_ms(session) // _HOUR_MS - min(hours, COUNTED_HOURS) + 1
    found = session.rows(
        f"SELECT hour, task, outcome, count FROM {_COUNTER} WHERE hour >= %s ORDER BY 1, 2, 3",
        (first,),
    )
    return [
        Counted(hour=hour, task=task, outcome=outcome, count=number)
        for hour, task, outcome, number in found
    ]


def _condition(selection: Selection, now_ms: int) -> tuple[str, list[object]]:
    """Return what selects records, for a WHERE over ``r`` and ``l``."""
    letters = [LETTERS[state] for state in sorted(selection.wanted, key=lambda each: each.value)]
    condition = f"r.state IN ({', '.join(['%s'] * len(letters))})"
    condition += " AND coalesce(l.expires_ms, r.expires_ms) > %s"
    params: list[object] = [*letters, now_ms]
    for column, wanted in (("namespace", selection.namespace), ("scope", selection.scope)):
        if wanted is not None:
            condition += f" AND r.{column} = %s"
            params.append(wanted)
    if selection.stale:
        condition += " AND l.deadline_ms <= %s"
        params.append(now_ms)
    if selection.created_before_ms is not None:
        condition += " AND r.created_ms < %s"
        params.append(selection.created_before_ms)
    return condition, params


def _stretch(
    session: Session, stretch: str, start: Sequence[object], *, indexed: bool
) -> tuple[int, Any]:
    """Return how many keys the stretch has, and the last of them."""
    column, last = ("digest", "max") if indexed else ("id", "min")
    if session.words.vendor == "postgresql" and indexed:
        # It has no max() of bytes before version 18.
        found = session.rows(f"SELECT digest FROM ({stretch}) w ORDER BY digest", start)
        return len(found), found[-1][0] if found else None
    ((number, end),) = session.rows(f"SELECT count(*), {last}({column}) FROM ({stretch}) w", start)
    return number, end


def _read(cursor: str, kind: str) -> int | bytes | None:
    """Return where a cursor points to.

    Raises:
        ValueError: if it is none of this kind.
    """
    if not cursor:
        return None
    word, _, place = cursor.partition(":")
    try:
        if word != kind:
            raise ValueError
        return int(place) if kind == "r" else bytes.fromhex(place)
    except ValueError:
        raise ValueError("this cursor belongs to another list") from None


def clock_ms(session: Session) -> int:
    """Return the time by the database's clock."""
    ((now_ms,),) = session.rows(f"SELECT {session.words.now_ms}")
    return int(now_ms)
