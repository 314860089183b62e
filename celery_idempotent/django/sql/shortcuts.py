"""The verbs of almost every task as one statement: claim of a free key, settle, release.

Each answers only where there is nothing to decide, and else leaves the verb to the long way: a look, a decision, a
conditional write. Only PostgreSQL can write two tables in one statement; elsewhere there is the long way alone. A claim
is this, and returns either the new token or the row that is in the way::

    WITH t AS (the time; how long to wait for a lock),
         s AS (what there is: the record's row and its lease row),
         r AS (INSERT the record's row, if there is no s; RETURNING its token),
         l AS (INSERT the lease row with the token of r)
    SELECT the token of r, the time, s
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache

from celery_idempotent.django.sql import plans
from celery_idempotent.django.sql.columns import (
    ENDED,
    LEASE,
    LIVE_SQL,
    PRUNE_SLACK_MS,
    RECORD,
    RELEASED,
    digest,
    lease_values,
    record_values,
)
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import LOCK_TIMEOUT_MS
from celery_idempotent.django.sql.rows import HIGH_WATER, ROW_ID, Row, read_columns, row_of
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores.deciding import Asked, Done, decide
from celery_idempotent.stores.table import Verb
from celery_idempotent.stores.values import LETTERS, pack_value

#: How the columns are computed from what they have if the time is 0 and there is no token yet.
_OF_RECORD = {
    "token": "greatest(us, %s + coalesce((SELECT max(token) FROM celery_idempotent_highwatermark), 0))",
    "created_ms": "us / 1000 + %s",
    "updated_ms": "us / 1000 + %s",
    "expires_ms": "us / 1000 + %s",
    "prune_ms": "us / 1000 + %s",
}
_OF_LEASE = {
    "deadline_ms": "created_ms + %s",
    "due_ms": "created_ms + %s",
    "expires_ms": "created_ms + %s",
}
#: A lease that was left behind is written over.
_OVER = ", ".join(
    f"{column} = excluded.{column}" if column != "version" else "version = lease.version + 1"
    for column in LEASE
)


def claim(session: Session, asked: Asked) -> Record | Row | None:
    """Claim a key that has no row; else return the row, ``None`` if it was written by another just now."""
    if session.words.vendor != "postgresql":
        return None
    identity = asked.fields["identity"]
    name, move = digest(identity), decide("claim", None, asked, 0)
    new = move.after(None, asked, 0, 1)
    record = {
        "digest": name,
        "namespace": identity.namespace,
        "scope": identity.scope,
        "key": identity.key,
        "prune_ms": new.expires_ms,
        **_filled(RECORD, record_values(new, 0)),
    }
    lease = _filled(LEASE, lease_values(new, 0))
    del lease["token"]  # the one that the record gets
    ((token, now_ms, *seen),) = plans.rows(
        session,
        _claim_statement(session.words.now_us, tuple(record), tuple(lease)),
        (name, *record.values(), *lease.values()),
    )
    if token is not None:
        return move.after(None, asked, now_ms, token).record
    return None if seen[ROW_ID] is None else row_of(session, name, identity, seen)


def _filled(columns: Sequence[str], values: Sequence[object]) -> dict[str, object]:
    """Return the columns that are not NULL."""
    return {
        column: value for column, value in zip(columns, values, strict=True) if value is not None
    }


@cache
def _claim_statement(now_us: str, record: tuple[str, ...], lease: tuple[str, ...]) -> str:
    return (
        f"{_clock(now_us)}, s AS MATERIALIZED (SELECT {read_columns()} FROM celery_idempotent_record r"
        " LEFT JOIN celery_idempotent_lease l ON l.digest = r.digest WHERE r.digest = %s"
        f"), r AS (INSERT INTO celery_idempotent_record ({', '.join(record)})"
        f" SELECT {', '.join(_OF_RECORD.get(column, '%s') for column in record)} FROM t"
        # Not left to the conflict alone: that waits for the transaction that is writing the row.
        " WHERE NOT EXISTS (SELECT 1 FROM s)"
        " ON CONFLICT (digest) DO NOTHING RETURNING digest, token, created_ms"
        f"), l AS (INSERT INTO celery_idempotent_lease AS lease (digest, token, {', '.join(lease)})"
        f" SELECT digest, token, {', '.join(_OF_LEASE.get(column, '%s') for column in lease)} FROM r"
        f" ON CONFLICT (digest) DO UPDATE SET {_OVER}"
        f") SELECT r.token, r.created_ms, t.us, {HIGH_WATER}, s.*"
        " FROM t LEFT JOIN r ON true LEFT JOIN s ON true"
    )


def _settle(session: Session, identity: Identity, asked: Asked) -> Done | None:
    """Complete a claim that is unfinished and not over; ``None`` for any other, and for a failure."""
    state, value, keep_ms = asked.fields["state"], asked.fields["value"], asked.keep_ms
    if (
        session.words.vendor != "postgresql"
        or state is not State.COMPLETED
        or asked.state
        or asked.fields["note"]
    ):
        return None
    found = plans.rows(
        session,
        _settle_statement(session.words.now_us),
        (
            LETTERS[state],
            None if value is None else pack_value(value),
            asked.fields["replaced"],
            keep_ms,
            keep_ms + PRUNE_SLACK_MS,
            digest(identity),
            asked.token,
        ),
    )
    return Done("settled") if found else None


@cache
def _settle_statement(now_us: str) -> str:
    return _end_statement(
        now_us,
        "state = %s, value = %s, replaced = %s,"
        " reserved = false, swept = false, updated_ms = us / 1000, expires_ms = us / 1000 + %s,"
        " prune_ms = least(prune_ms, us / 1000 + %s)",
        f"record.{LIVE_SQL}",
    )


def _end_statement(now_us: str, changes: str, condition: str) -> str:
    """Return what changes a record's row and deletes its lease row; both only if the claim is not over."""
    return (
        f"{_clock(now_us)}, r AS ("
        f"UPDATE celery_idempotent_record AS record SET {changes}, version = record.version + 1"
        " FROM t, celery_idempotent_lease AS lease"
        f" WHERE record.digest = %s AND record.token = %s AND {condition}"
        " AND lease.digest = record.digest AND lease.token = record.token"
        " AND lease.expires_ms > us / 1000 RETURNING record.digest"
        "), l AS (DELETE FROM celery_idempotent_lease USING r"
        " WHERE celery_idempotent_lease.digest = r.digest) SELECT 1 FROM r"
    )


def _release_row(session: Session, identity: Identity, asked: Asked) -> Done | None:
    """Give back a claim without steps; ``None`` for any other."""
    if session.words.vendor != "postgresql":
        return None
    found = plans.rows(
        session,
        _release_statement(session.words.now_us),
        (RELEASED, PRUNE_SLACK_MS, digest(identity), asked.token, asked.delay_ms is not None),
    )
    return Done("released") if found else None


@cache
def _release_statement(now_us: str) -> str:
    return _end_statement(
        now_us,
        "state = %s, value = NULL,"
        " expires_ms = us / 1000, prune_ms = least(prune_ms, us / 1000 + %s)",
        "record.state IN ('P', 'Q') AND lease.steps IS NULL"
        " AND NOT ((record.reserved OR lease.message IS NOT NULL) AND %s)",
    )


def _mark_delivered(session: Session, identity: Identity, asked: Asked) -> Done:
    """Mark a settled record, on any database."""
    marked = session.write(
        "UPDATE celery_idempotent_record SET delivered = %s, version = version + 1"
        f" WHERE digest = %s AND token = %s AND {ENDED}"
        f" AND expires_ms > {session.words.now_ms}",
        (True, digest(identity), asked.token),
    )
    return Done("marked" if marked == 1 else "lost")


#: Verbs that are one statement, where this is all that they need; ``None`` leaves one to the long way.
SHORTCUTS: Mapping[Verb, Callable[[Session, Identity, Asked], Done | None]] = {
    "settle": _settle,
    "release": _release_row,
    "mark_delivered": _mark_delivered,
}


def _clock(now_us: str) -> str:
    """Open a statement with the time, read once, and with a bound to its waits for locks.

    What is set is local to the statement's own transaction. It works within the statement that sets
    it, because the row that is to be locked is found by way of this one.
    """
    return (
        f"WITH t AS MATERIALIZED (SELECT {now_us} AS us,"
        f" set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true))"
    )
