"""What operators see of a database: lists in bounded steps, counts, and counters by the hour.

A page is a stretch of an index, and of that what the filter selects. However few records a filter matches, a page looks
at ``look_at`` rows at the most::

    index    │ r1 r2 r3 r4 r5 r6 │ r7 r8 …       look_at = 6
    page     │    r2       r5    │               two are selected
    cursor                     ▲ r6              the next page begins behind the last that was looked at
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.rows import (
    COLUMNS,
    DIGEST_BYTES,
    EXPIRES,
    STATE,
    UNFINISHED,
    stored_record,
)
from celery_idempotent.records import Counted, Identity, Page, Record, Selection, Stats
from celery_idempotent.stores.base import COUNTED_HOURS, HOUR_MS, read_cursor, write_cursor
from celery_idempotent.stores.fields import LETTERS

#: How many unfinished records of a state are counted.
COUNTED = 10_000

_COUNTER = "celery_idempotent_counter"
#: Values are not read for a list; the text has the message and the steps, which are left out later.
_SUMMARY = ", ".join("NULL" if name == "value" else name for name in COLUMNS)


def list_records(
    session: Session, selection: Selection, *, cursor: str, limit: int, look_at: int
) -> Page:
    """Return about ``limit`` records from ``cursor`` on: the newest claim first, or the one that is kept longest.

    COMPLETED records are in no index but that of prunes.

    Raises:
        ValueError: for a cursor of another order.
    """
    kind, order, where = (
        ("k", "prune_ms", "0 = 0") if selection.scans else ("n", "token", UNFINISHED)
    )
    place: tuple[int, ...] | None = read_cursor(cursor, kind, 2) if cursor else None
    letters = {LETTERS[state] for state in selection.wanted}
    now_ms, found, looked = database_ms(session), list[Record](), 0
    while True:
        batch = min(look_at - looked, max(4 * limit, 100))
        rows = _stretch(session, order, where, place, batch)
        for at, name, namespace, scope, key, *row in rows:
            looked, place = looked + 1, (at, int.from_bytes(bytes(name), "big"))
            identity = Identity(namespace=namespace, scope=scope, key=key)
            if row[STATE] in letters and row[EXPIRES] > now_ms and selection.names(identity):
                record = stored_record(identity, row).record
                if selection.includes(record, now_ms):
                    found.append(replace(record, message=None, steps=()))
                    if len(found) == limit:
                        break
        else:
            if len(rows) < batch:
                place = None  # the end
                break
        if len(found) == limit or looked >= look_at:
            break
    return Page(
        records=tuple(found),
        cursor="" if place is None else write_cursor(kind, *place),
        looked_at=looked,
        now_ms=now_ms,
    )


def _stretch(
    session: Session, order: str, where: str, place: tuple[int, ...] | None, batch: int
) -> list[tuple[Any, ...]]:
    after, params = "", list[object]()
    if place is not None:
        after = f" AND {order} <= %s AND ({order} < %s OR digest < %s)"
        # The number of a made-up cursor may be too large for a digest.
        name = (place[1] % 256**DIGEST_BYTES).to_bytes(DIGEST_BYTES, "big")
        params = [place[0], place[0], name]
    return session.rows(
        f"SELECT {order}, digest, namespace, scope, {session.dialect.key}, {_SUMMARY} FROM celery_idempotent_record"
        f" WHERE {where}{after} ORDER BY {order} DESC, digest DESC LIMIT %s",
        (*params, batch),
    )


def stats(session: Session) -> Stats:
    """Count what is unfinished or failed, of each state up to :data:`COUNTED`."""
    ((now_ms, swept_ms),) = session.rows(
        f"SELECT {session.dialect.now_ms}, (SELECT max(ended_ms) FROM celery_idempotent_sweep)"
    )
    counts: Counter[str] = Counter()
    for letter in "QPIF":
        past = "CASE WHEN deadline_ms <= %s THEN 1 ELSE 0 END"
        found = session.rows(
            f"SELECT past, count(*) FROM (SELECT {past} AS past FROM celery_idempotent_record WHERE {UNFINISHED}"
            f" AND state = '{letter}' AND expires_ms > %s LIMIT %s) s GROUP BY past",
            (now_ms, now_ms, COUNTED + 1),
        )
        for is_past, number in found:
            ended = {"I": "interrupted", "F": "failed"}.get(letter)
            counts[ended or ("stale" if is_past else "live")] += number
    return Stats(
        live=min(counts["live"], COUNTED),
        stale=min(counts["stale"], COUNTED),
        interrupted=min(counts["interrupted"], COUNTED),
        failed=min(counts["failed"], COUNTED),
        now_ms=now_ms,
        swept_ms=swept_ms,
        at_least=frozenset(name for name, number in counts.items() if number > COUNTED),
    )


def count(session: Session, outcomes: Mapping[tuple[str, str], int]) -> None:
    """Add to the counters of this hour, and drop those of the hour that is too long ago."""
    hour = database_ms(session) // HOUR_MS
    # In one order: two processes that count the same outcomes in different orders would deadlock.
    rows = [
        (hour, task[:255], outcome[:32], number)
        for (task, outcome), number in sorted(outcomes.items())
    ]
    if rows:
        session.execute(
            f"INSERT INTO {_COUNTER} (hour, task, outcome, count) VALUES"
            f" {', '.join(['(%s, %s, %s, %s)'] * len(rows))}{session.dialect.or_add}",
            [value for row in rows for value in row],
        )
    session.execute(f"DELETE FROM {_COUNTER} WHERE hour <= %s", (hour - COUNTED_HOURS,))


def note_sweep(session: Session) -> None:
    """Note that a sweep ended just now."""
    words = session.dialect
    session.execute(
        "INSERT INTO celery_idempotent_sweep (id, ended_ms)"
        f" VALUES (1, {words.now_ms}){words.or_later}"
    )


def counts(session: Session, *, hours: int) -> Sequence[Counted]:
    """Return the counters of the last hours."""
    first = database_ms(session) // HOUR_MS - min(hours, COUNTED_HOURS) + 1
    found = session.rows(
        f"SELECT hour, task, outcome, count FROM {_COUNTER} WHERE hour >= %s ORDER BY 1, 2, 3",
        (first,),
    )
    return [
        Counted(hour=hour, task=task, outcome=outcome, count=number)
        for hour, task, outcome, number in found
    ]


def database_ms(session: Session) -> int:
    """Return the time by the database's clock."""
    ((now_ms,),) = session.rows(f"SELECT {session.dialect.now_ms}")
    return int(now_ms)
