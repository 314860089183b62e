"""What operators see of a database: lists in bounded steps, counts, and counters by the hour.

A page is a stretch of an index (the *walk*), and of that what the filter selects. However few records a filter matches,
a page looks at ``look_at`` rows at the most::

    index    │ r1 r2 r3 r4 r5 r6 │ r7 r8 …       look_at = 6
    page     │    r2       r5    │               two are selected
    cursor                     ▲ r6              the next page begins behind the last that was looked at
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from celery_idempotent.django.sql.columns import DIGEST_BYTES, record_of, summary_columns
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import Dialect
from celery_idempotent.records import Counted, Page, Selection, Stats
from celery_idempotent.stores.base import COUNTED_HOURS
from celery_idempotent.stores.listing import HOUR_MS, read_cursor, write_cursor
from celery_idempotent.stores.values import LETTERS

#: Letters of the states that no lease runs in, and what they are counted as.
_COUNTED_AS = {"F": "failed", "I": "interrupted"}
#: How many leases of a kind are counted: joining more of them with their records takes seconds.
COUNTED = 10_000

_COUNTER = "celery_idempotent_counter"


def list_records(
    session: Session, selection: Selection, *, cursor: str, limit: int, look_at: int
) -> Page:
    """Return about ``limit`` records from ``cursor`` on: the newest first, or by lease."""
    now_ms = database_ms(session)
    walk = _walk(selection, cursor, look_at)
    condition, params = _condition(session.words, selection, now_ms)
    place = ", ".join(f"w.{column}" for column in walk.columns)
    found = session.rows(
        f"SELECT {place}, {summary_columns(session.words)} FROM ({walk.stretch}) w{walk.rest}"
        f" WHERE {condition} ORDER BY {walk.order('w.')} LIMIT %s",
        (*walk.params, *params, limit),
    )
    # A page looks at a stretch of an index, and shows what is selected of it. Where the stretch ends must be known also
    # if nothing of it was selected.
    seen = session.rows(
        f"SELECT {place} FROM ({walk.stretch}) w ORDER BY {walk.order('w.')}", walk.params
    )
    width, end = len(walk.columns), None
    if len(found) == limit:
        end = found[-1][:width]
    elif len(seen) == look_at:
        end = seen[-1]
    records = [record_of(row[width:]) for row in found]
    return Page(
        records=tuple(replace(each, value=None, message=None, steps=()) for each in records),
        cursor="" if end is None else walk.cursor(end),
        looked_at=len(seen),
        now_ms=now_ms,
    )


def stats(session: Session) -> Stats:
    """Count what has a lease row, of each kind up to :data:`COUNTED`: indexes find the rows by due time or state."""
    ((now_ms, swept_ms),) = session.rows(
        f"SELECT {session.words.now_ms}, (SELECT max(ended_ms) FROM celery_idempotent_sweep)"
    )
    counts: Counter[str] = Counter()
    cut: set[str] = set()
    for condition, params, names in (
        ("due_ms <= %s", [now_ms], {"stale"}),
        ("due_ms > %s", [now_ms], {"live"}),
        # No sweep looks at these: FAILED and INTERRUPTED ones, and reservations that have no message to send
        # again.
        ("due_ms IS NULL", [], {"live", "stale"}),
        (_ended("I"), [], {"interrupted"}),
        (_ended("F"), [], {"failed"}),
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
            name = _COUNTED_AS.get(letter) or ("stale" if past else "live")
            if valid and name in names:
                counts[name] += number
        if sum(row[-1] for row in found) > COUNTED:
            cut |= names
    cut |= {name for name, number in counts.items() if number > COUNTED}
    return Stats(
        live=min(counts["live"], COUNTED),
        stale=min(counts["stale"], COUNTED),
        interrupted=min(counts["interrupted"], COUNTED),
        failed=min(counts["failed"], COUNTED),
        now_ms=now_ms,
        swept_ms=swept_ms,
        at_least=frozenset(cut),
    )


def _ended(letter: str) -> str:
    """Return what selects leases of one of these states; SQLite takes a partial index only by the index's own words."""
    return f"state = '{letter}' AND state IN ('F', 'I')"


def count(session: Session, outcomes: Mapping[tuple[str, str], int]) -> None:
    """Add to the counters of this hour, and drop those of the hour that is too long ago."""
    hour = database_ms(session) // HOUR_MS
    with session.transaction():
        # In one order: two processes that count the same outcomes in different orders would deadlock.
        for (task, outcome), number in sorted(outcomes.items()):
            session.write(
                f"INSERT INTO {_COUNTER} (hour, task, outcome, count) VALUES (%s, %s, %s, %s)"
                + session.words.or_add,
                (hour, task[:255], outcome[:32], number),
            )
    session.write(f"DELETE FROM {_COUNTER} WHERE hour <= %s", (hour - COUNTED_HOURS,))


def note_sweep(session: Session) -> None:
    """Note that a sweep ended just now."""
    words = session.words
    with session.transaction():
        session.write(
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


def _condition(words: Dialect, selection: Selection, now_ms: int) -> tuple[str, list[object]]:
    """Return what selects records, for a WHERE over ``r`` and ``l``."""
    conditions = ["coalesce(l.expires_ms, r.expires_ms) > %s"]
    params: list[object] = [now_ms]
    for column, wanted in (
        ("state", [LETTERS[state] for state in selection.wanted]),
        ("namespace", [] if selection.namespace is None else [selection.namespace]),
        ("scope", selection.scopes),
        (words.key, selection.keys),
    ):
        if wanted:
            conditions.append(f"r.{column} IN ({', '.join(['%s'] * len(wanted))})")
            params += sorted(wanted)
    for condition, at_ms in (
        ("l.deadline_ms <= %s", now_ms if selection.stale else None),
        ("r.updated_ms >= %s", selection.since_ms),
        ("r.updated_ms < %s", selection.before_ms),
    ):
        if at_ms is not None:
            conditions.append(condition)
            params.append(at_ms)
    return " AND ".join(conditions), params


def _walk(selection: Selection, cursor: str, look_at: int) -> _Walk:
    """Return the shortest way through the keys that finds all that is selected, from the cursor on.

    COMPLETED records are the only ones without a lease row: where they are wanted, the way leads through all records.

    Raises:
        ValueError: for a cursor of another way.
    """
    if selection.scans:
        walk, after = _Walk("r", ("id",), "record", " DESC"), "id < %s"
    elif not selection.newest_first:
        walk, after = _Walk("l", ("digest",), "lease", ""), "digest > %s"
    else:
        walk, after = _Walk("n", ("token", "digest"), "lease", " DESC"), "token <= %s"
        after += " AND (token < %s OR digest < %s)"
    start, conditions = walk.read(cursor) if cursor else [], []
    if walk.kind == "n":
        (state,) = selection.wanted
        conditions.append(_ended(LETTERS[state]))
        start = [*start[:1], *start]
    if start:
        conditions.append(after)
    where = " WHERE " + " AND ".join(conditions) if conditions else ""
    walk.stretch = f"SELECT {', '.join(walk.columns)} FROM celery_idempotent_{walk.table}{where}"
    walk.stretch += f" ORDER BY {walk.order()} LIMIT %s"
    walk.params = [*start, look_at]
    return walk


@dataclass(slots=True)
class _Walk:
    """A way through the keys: the columns of a table that it is ordered by, and the query for its next stretch."""

    kind: str
    columns: tuple[str, ...]
    table: str
    direction: str
    stretch: str = ""
    params: list[object] = field(default_factory=list)

    @property
    def rest(self) -> str:
        """What brings the rows of the records and the leases to a stretch ``w``."""
        if self.table == "record":
            return (
                " JOIN celery_idempotent_record r ON r.id = w.id"
                " LEFT JOIN celery_idempotent_lease l ON l.digest = r.digest AND l.token = r.token"
            )
        same = " AND ".join(f"l.{column} = w.{column}" for column in self.columns)
        return (
            f" JOIN celery_idempotent_lease l ON {same}"
            " JOIN celery_idempotent_record r ON r.digest = l.digest AND r.token = l.token"
        )

    def order(self, of: str = "") -> str:
        """Return what the stretch is ordered by."""
        return ", ".join(f"{of}{column}{self.direction}" for column in self.columns)

    def cursor(self, place: Sequence[int | bytes]) -> str:
        """Return where to go on: after this place."""
        return write_cursor(
            self.kind, *[p if isinstance(p, int) else int.from_bytes(p, "big") for p in place]
        )

    def read(self, cursor: str) -> list[object]:
        """Return the place that a cursor points to."""
        numbers = read_cursor(cursor, self.kind, len(self.columns))
        pairs = zip(self.columns, numbers, strict=True)
        # The number of a made-up cursor may be too large for a digest.
        return [
            (n % 256**DIGEST_BYTES).to_bytes(DIGEST_BYTES, "big") if column == "digest" else n
            for column, n in pairs
        ]


def database_ms(session: Session) -> int:
    """Return the time by the database's clock."""
    ((now_ms,),) = session.rows(f"SELECT {session.words.now_ms}")
    return int(now_ms)
