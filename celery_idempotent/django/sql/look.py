"""What one look at a row finds, and how it is written over: one statement each, on condition of what was seen.

The statements of almost every task are here too: the claim of a free key and the settle of one's own claim.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import DIALECTS, Dialect
from celery_idempotent.django.sql.rows import (
    COLUMNS,
    DEADLINE,
    EXPIRES,
    OPEN,
    PRUNE_SLACK_MS,
    RELEASED,
    STATE,
    TOKEN,
    column_values,
    digest,
    stored_record,
)
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import WITHOUT_VALUE, Identity, Record, SettleRequest
from celery_idempotent.stores import table
from celery_idempotent.stores.table import Asked, StoredRecord, after, decide

__all__ = ["Look", "claim_free_key", "settle_claim"]

logger = logging.getLogger(__name__)

#: For how long a lease is said to be alive whose run is within its transaction.
_RUNNING_MS = 1_000

_MARK = "coalesce((SELECT max(token) FROM celery_idempotent_highwatermark), 0)"
_WRITE = ", ".join(f"{name} = %s" for name in COLUMNS)
#: These count from the server's own time.
_MOMENTS = {"created_ms", "updated_ms", "deadline_ms", "due_ms", "expires_ms"}


class Look(table.Look):
    """What one look found, within a session; a released or expired row is none, but for its token."""

    def __init__(self, session: Session, identity: Identity, row: Sequence[Any] = ()) -> None:
        self.session, self.identity, self.digest = session, identity, digest(identity)
        if not row:
            (row,) = session.rows(_look_statement(session.dialect), (self.digest,))
        self.now_us, mark, self.version, self.prune_ms, *names, key = row[:7]
        if self.version is not None:
            found = Identity(namespace=names[0], scope=names[1], key=key)
            if found != identity:
                raise StoreMisconfigured(
                    f"{identity} and {found} share a digest: one of them was forged"
                )
        columns = row[7:]
        self.highest = max(mark, columns[TOKEN] or 0)
        self.stored: StoredRecord | None = None
        if columns[STATE] not in (None, RELEASED):
            # A run within its transaction is not over, however long ago its lease was.
            end = max(columns[EXPIRES], columns[DEADLINE] or 0)
            if end > self.now_us // 1000:
                self.stored = stored_record(identity, columns)

    def write(self, after: StoredRecord) -> None:
        """Store this, if nobody else wrote since."""
        session = self.session
        values = _values(session, after)
        if self.version is None:
            identity = self.identity
            session.swap(
                f"INSERT INTO celery_idempotent_record ({_names(session.dialect)}) VALUES ("
                f"{', '.join(['%s'] * (len(COLUMNS) + 6))}){session.dialect.or_nothing}",
                (
                    *(self.digest, identity.namespace, identity.scope, identity.key),
                    *(after.expires_ms, 0, *values),
                ),
            )
            return
        if after.record.token < self.highest:
            # A claim that was given back is settled after all, and the key was claimed since: tokens go on from there.
            session.execute(session.dialect.raise_mark, (self.highest,))
        session.swap(
            f"UPDATE celery_idempotent_record SET {_WRITE}, prune_ms = %s, version = version + 1"
            " WHERE digest = %s AND version = %s",
            (
                *values,
                min(self.prune_ms, after.expires_ms + PRUNE_SLACK_MS),
                *(self.digest, self.version),
            ),
        )

    def remove(self, *, forget: bool) -> None:
        """Give the key back; with ``forget`` delete the row, whose token is remembered."""
        session, now_ms = self.session, self.now_us // 1000
        if forget:
            session.execute(session.dialect.raise_mark, (self.highest,))
            session.swap(
                "DELETE FROM celery_idempotent_record WHERE digest = %s AND version = %s",
                (self.digest, self.version),
            )
            return
        session.swap(
            f"UPDATE celery_idempotent_record SET state = '{RELEASED}', value = NULL, data = '', due_ms = NULL,"
            " expires_ms = %s, prune_ms = %s, version = version + 1 WHERE digest = %s AND version = %s",
            (now_ms, min(self.prune_ms, now_ms + PRUNE_SLACK_MS), self.digest, self.version),
        )


def claim_free_key(session: Session, identity: Identity, asked: Asked) -> Record | Look:
    """Claim a key that has no row, in one statement on PostgreSQL; else look at what is there."""
    words = session.dialect
    if words.vendor != "postgresql":
        # Elsewhere a duplicate's INSERT would wait for whoever writes the row, on SQLite for whoever writes at all.
        return Look(session, identity)
    rule, name = decide("claim", None, asked, 0), digest(identity)
    new = column_values(after(rule, None, asked, 0, 0))
    values = (identity.namespace, identity.scope, identity.key, new[EXPIRES], *new)
    ((token, now_ms, *row),) = session.rows(
        _claim_statement(words.now_us), (name, *values, name, name)
    )
    if token is not None:
        return after(rule, None, asked, now_ms, token).record
    return Look(session, identity, row)


def settle_claim(session: Session, request: SettleRequest, *, atomic: bool = False) -> bool:
    """Settle a claim as its owner knows it; ``False``: look at what is there.

    It is the only settle of an ``atomic`` run: however long ago its claim was, and whatever a sweep made of the record.
    """
    words, record, keep_ms = session.dialect, request.record, max(request.keep_ms, 1)
    asked = table.asked_to_settle(request)
    before = StoredRecord(record, 0)
    settled = after(decide("settle", before, asked, 0), before, asked, 0, record.token)
    letter, *_, data, value = _values(session, settled)
    where = OPEN if atomic else f"state = 'P' AND expires_ms > {words.now_ms}"
    # What SET LOCAL has set is gone with the transaction that the claim's run began.
    own = words.vendor == "postgresql" and atomic
    where += " AND current_setting('celery_idempotent.token', true) = token::text" if own else ""
    return (
        session.execute(
            f"UPDATE celery_idempotent_record SET state = %s, data = %s, value = %s, updated_ms = {words.now_ms},"
            f" deadline_ms = NULL, due_ms = NULL, expires_ms = {words.now_ms} + %s,"
            f" prune_ms = {words.least}(prune_ms, {words.now_ms} + %s), version = version + 1"
            f" WHERE digest = %s AND token = %s AND {where}",
            (
                *(letter, data, value, keep_ms, keep_ms + PRUNE_SLACK_MS),
                *(digest(record.identity), record.token),
            ),
        )
        == 1
    )


def _values(session: Session, stored: StoredRecord) -> tuple[object, ...]:
    """Return the columns of a record, without a value that the server does not take."""
    *columns, value = column_values(stored)
    if isinstance(value, bytes) and not session.takes(value):
        logger.warning(
            "idempotency: the result of %s, of %d bytes, is more than the database accepts (max_allowed_packet), "
            "and is not kept in its record: duplicates %s",
            stored.record.identity,
            len(value),
            WITHOUT_VALUE[stored.record.state],
        )
        value = None
    return (*columns, value)


def _names(words: Dialect) -> str:
    return f"digest, namespace, scope, {words.key}, prune_ms, version, {', '.join(COLUMNS)}"


def _look_columns(words: Dialect) -> str:
    """Return what a look reads of ``r``: a lease that is over lives on with its run's transaction."""
    deadline = (
        f"CASE WHEN r.state = 'P' AND r.deadline_ms <= {words.now_ms} AND {words.running}"
        f" THEN {words.now_ms} + {_RUNNING_MS} ELSE r.deadline_ms END"
    )
    columns = ", ".join(deadline if name == "deadline_ms" else f"r.{name}" for name in COLUMNS)
    names = f"r.namespace, r.scope, r.{words.key}"
    return f"{words.now_us}, {_MARK}, r.version, r.prune_ms, {names}, {columns}"


def _look_statement(words: Dialect) -> str:
    return (
        f"SELECT {_look_columns(words)} FROM (SELECT 1 AS one) AS one"
        " LEFT JOIN celery_idempotent_record r ON r.digest = %s"
    )


@lru_cache(maxsize=8)  # in tests a clock is an expression of its own
def _claim_statement(now_us: str) -> str:
    words = replace(DIALECTS["postgresql"], now_us=now_us)
    values = [f"{words.now_ms} + %s" if name in _MOMENTS else "%s" for name in COLUMNS]
    values[TOKEN] = f"greatest({now_us}, 1 + %s + {_MARK})"
    # The last is the value, which may be NULL.
    row = f"%s, %s, %s, %s, {words.now_ms} + %s, 0, {', '.join(values)}::bytea"
    # Not left to the conflict alone: that waits for the transaction that is writing the row.
    return (
        f"WITH n AS (INSERT INTO celery_idempotent_record ({_names(words)}) SELECT {row}"
        " WHERE NOT EXISTS (SELECT 1 FROM celery_idempotent_record WHERE digest = %s)"
        f" ON CONFLICT (digest) DO NOTHING RETURNING token, created_ms) SELECT n.token, n.created_ms,"
        f" {_look_columns(words)} FROM (SELECT 1) AS one LEFT JOIN n ON true"
        " LEFT JOIN celery_idempotent_record r ON r.digest = %s"
    )
