"""A record as a row, what one look at a row finds, and the writes: one statement each, on condition of what was seen.

Columns that statements read, one JSON text that only Python reads, the value's bytes. What a later version adds to a
record goes into the text: it needs no column, no migration, and no line here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import TOKENS, Dialect, dialect_of
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, Record, SettleRequest, State
from celery_idempotent.serializers import log_not_kept
from celery_idempotent.stores import table
from celery_idempotent.stores.fields import LETTERS, STATES, STORED, FieldCodec, Unreadable
from celery_idempotent.stores.table import StoredRecord, VerbArguments, after, decide

#: Enough that a second key for a digest cannot be found. Two keys of one digest would hurt only who made both.
DIGEST_BYTES = 16
#: How much later than its end a row may be looked at by a prune: the indexed time is written again
#: only where it is further away than that.
PRUNE_SLACK_MS = 3_600_000
#: A key that was given back: as if there were no row, but for the token, which must not be given out twice.
RELEASED = "R"
#: For how long a lease is said to be alive whose run is within its transaction.
_RUNNING_MS = 1_000

#: What the partial index of unfinished and failed keys is of; SQLite takes it only by its own words.
UNFINISHED = "state IN ('Q', 'P', 'I', 'F')"
#: A claim whose owner may settle it, whatever became of its lease; also one that a sweep failed: the token decides.
OPEN = "(state IN ('Q', 'P', 'I') OR (state = 'F' AND data LIKE '%%\"swept\":true%%'))"

#: The columns that are written together, in this order.
COLUMNS = (
    "state", "token", "created_ms", "updated_ms", "deadline_ms", "due_ms", "expires_ms", "crashes", "task_id", "data",
    "value",
)  # fmt: skip
#: The places of those that a look at the row itself needs.
STATE, TOKEN, DEADLINE, EXPIRES = (
    COLUMNS.index(name) for name in ("state", "token", "deadline_ms", "expires_ms")
)
#: These count from the server's own time.
_MOMENTS = {"created_ms", "updated_ms", "deadline_ms", "due_ms", "expires_ms"}

_CODEC = FieldCodec("fingerprint", *COLUMNS, ascii_only=True)
_write_line = _CODEC.writer(STORED)

_MARK = f"coalesce((SELECT value FROM celery_idempotent_mark WHERE id = {TOKENS}), 0)"


@lru_cache(maxsize=256)
def digest(identity: Identity) -> bytes:
    """Return what finds the row of an identity."""
    names = identity.namespace.encode(), identity.scope.encode()
    text = b"".join(len(each).to_bytes(2, "big") + each for each in names) + identity.key.encode()
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


def column_values(session: Session, stored: StoredRecord) -> tuple[object, ...]:
    """Return what :data:`COLUMNS` are for a record, without a value that the server does not take.

    Raises:
        StoreMisconfigured: if it does not take steps and message either.
    """
    record = stored.record
    ids = {"fingerprint": record.fingerprint, "attempt": stored.attempt}
    others = {name: each.hex() for name, each in ids.items() if each}
    data = _write_line(stored, record.value, record.message, record.steps, others).decode()
    kept, value = len(data), None if record.value is None else record.value.body
    if value is not None and not session.takes(kept + len(value)):
        problem = f"its {len(value):,} bytes are more than half of max_allowed_packet"
        log_not_kept(record.identity, record.state, problem)
        value = None
    if not session.takes(kept):
        raise StoreMisconfigured(
            f"steps and message of {record.identity} take {kept:,} bytes, more than half of the server's"
            " max_allowed_packet: raise that, or keep less in a step"
        )
    # A sweep has to act on a lease, or on a message that it can send.
    is_due = record.state is State.PROCESSING or record.message is not None
    times = record.created_ms, record.updated_ms, record.deadline_ms
    ends = record.deadline_ms if is_due else None, stored.expires_ms
    rest = record.crashes, record.task_id, data, value
    return LETTERS[record.state], record.token, *times, *ends, *rest


def stored_record(identity: Identity, row: Sequence[Any]) -> StoredRecord:
    """Return the record of a row with :data:`COLUMNS`.

    Raises:
        Unreadable: if it is damaged, or a newer version wrote it.
    """
    columns = dict(zip(COLUMNS, row, strict=True))
    letter, data, value, expires_ms, _ = map(
        columns.pop, ("state", "data", "value", "expires_ms", "due_ms")
    )
    try:
        state, body = STATES[letter], None if value is None else bytes(value)
        rest = _CODEC.decode((data or "").encode(), body)
        attempt, requeues = bytes.fromhex(rest.pop("attempt", "")), rest.pop("requeues", 0)
        if "fingerprint" in rest:
            rest["fingerprint"] = bytes.fromhex(rest["fingerprint"])
        record = Record(identity=identity, state=state, **columns, **rest)
    except (ValueError, KeyError, TypeError) as error:
        place = f"digest {digest(identity).hex()} in celery_idempotent_record"
        raise Unreadable.at(identity, place) from error
    return StoredRecord(record, expires_ms, attempt, requeues)


class RowSnapshot(table.Snapshot):
    """What one look found, within a session; a released or expired row is none, but for its token."""

    def __init__(self, session: Session, identity: Identity, row: Sequence[Any] = ()) -> None:
        self.session, self.identity, self.digest = session, identity, digest(identity)
        if not row:
            (row,) = session.rows(
                f"SELECT {_look_columns(session.dialect)} FROM (SELECT 1 AS one) AS one"
                " LEFT JOIN celery_idempotent_record r ON r.digest = %s",
                (self.digest,),
            )
        self.now_us, mark, self.version, *columns = row
        self.highest = max(mark, columns[TOKEN] or 0)
        self.stored: StoredRecord | None = None
        if columns[STATE] not in (None, RELEASED):
            # A run within its transaction is not over, however long ago its lease was.
            end = max(columns[EXPIRES], columns[DEADLINE] or 0)
            if end > self.now_us // 1000:
                self.stored = stored_record(identity, columns)

    def write(self, after: StoredRecord) -> None:
        """Store this, unless another session wrote since."""
        session, identity, values = self.session, self.identity, column_values(self.session, after)
        if self.version is None:
            marks = f"({', '.join(['%s'] * (len(COLUMNS) + 6))}){session.dialect.or_nothing}"
            names = identity.namespace, identity.scope, identity.key
            session.swap(
                f"INSERT INTO celery_idempotent_record ({_names(session.dialect)}) VALUES {marks}",
                (self.digest, *names, after.expires_ms, 0, *values),
            )
            return
        if after.record.token < self.highest:
            # A claim that was given back is settled after all, and the key was claimed since: tokens go on from there.
            session.execute(session.dialect.raise_mark, (TOKENS, self.highest))
        self._update(dict(zip(COLUMNS, values, strict=True)), after.expires_ms)

    def remove(self, *, forget: bool) -> None:
        """Give the key back; with ``forget`` delete the row, whose token is remembered."""
        session, now_ms = self.session, self.now_us // 1000
        if forget:
            session.execute(session.dialect.raise_mark, (TOKENS, self.highest))
            delete = "DELETE FROM celery_idempotent_record WHERE digest = %s AND version = %s"
            session.swap(delete, (self.digest, self.version))
        else:
            released = {"state": RELEASED, "value": None, "data": "", "due_ms": None}
            self._update({**released, "expires_ms": now_ms}, now_ms)

    def _update(self, row: Mapping[str, object], expires_ms: int) -> None:
        params = *row.values(), expires_ms + PRUNE_SLACK_MS, self.digest, self.version
        self.session.swap(_update(self.session.dialect, row, "version = %s"), params)


def claim_free_key(
    session: Session, identity: Identity, args: VerbArguments
) -> Record | RowSnapshot:
    """Claim a key that has no row, in one statement on PostgreSQL; else look at what is there."""
    dialect = session.dialect
    if dialect.vendor != "postgresql":
        # Elsewhere a duplicate's INSERT would wait for a writer of the row, on SQLite for any writer.
        return RowSnapshot(session, identity)
    rule, name = decide("claim", None, args, 0), digest(identity)
    new = column_values(session, after(rule, None, args, 0, 0))
    values = (identity.namespace, identity.scope, identity.key, new[EXPIRES], *new)
    ((token, now_ms, *row),) = session.rows(
        _claim_statement(dialect.now_us), (name, *values, name, name)
    )
    if token is not None:
        return after(rule, None, args, now_ms, token).record
    return RowSnapshot(session, identity, row)


def settle_claim(session: Session, request: SettleRequest, *, first: str | None = None) -> bool:
    """Settle a claim as its owner knows it; ``False``: look at what is there.

    Of an atomic run (a statement goes ``first``, or "") it is the only settle, whatever a sweep made of the record.
    """
    dialect, record, args = session.dialect, request.record, table.arguments(request)
    before, now_ms, where = StoredRecord(record, 0), dialect.now_ms, OPEN
    settled = after(decide("settle", before, args, 0), before, args, 0, record.token)
    if first is None:
        # After a crash that a sweep counted, the record may know of copies that the owner does not.
        where = f"state = 'P' AND crashes = {record.crashes:d} AND expires_ms > {now_ms}"
    elif dialect.vendor == "postgresql":
        # What SET LOCAL has set is gone with the transaction that the claim's run began.
        where += " AND current_setting('celery_idempotent.token', true) = token::text"
    row = dict(zip(COLUMNS, column_values(session, settled), strict=True))
    # They are as they were; a sweep may have counted a crash since.
    for name in ("token", "created_ms", "crashes", "task_id"):
        del row[name]
    update = _update(dialect, row, f"token = %s AND {where}", f"{now_ms} + ")
    names = digest(record.identity), record.token
    params = *row.values(), args.keep_ms + PRUNE_SLACK_MS, *names
    return session.execute(update, params, first=first or "") == 1


def _update(dialect: Dialect, row: Mapping[str, object], where: str, start: str = "") -> str:
    """Return the UPDATE of a row with a digest; its moments, and the time of its prune, count from a ``start``."""
    changes = [f"{each} = {start if each in _MOMENTS else ''}%s" for each in row]
    return (
        f"UPDATE celery_idempotent_record SET {', '.join(changes)}, version = version + 1,"
        f" prune_ms = {dialect.least}(prune_ms, {start}%s) WHERE digest = %s AND {where}"
    )


def _names(dialect: Dialect) -> str:
    return f"digest, namespace, scope, {dialect.key}, prune_ms, version, {', '.join(COLUMNS)}"


def _look_columns(dialect: Dialect) -> str:
    """Return what a look reads of ``r``: a lease that is over lives on with its run's transaction."""
    deadline = (
        f"CASE WHEN r.state = 'P' AND r.deadline_ms <= {dialect.now_ms} AND {dialect.running}"
        f" THEN {dialect.now_ms} + {_RUNNING_MS} ELSE r.deadline_ms END"
    )
    columns = ", ".join(deadline if name == "deadline_ms" else f"r.{name}" for name in COLUMNS)
    return f"{dialect.now_us}, {_MARK}, r.version, {columns}"


@lru_cache(maxsize=8)  # in tests a clock is an expression of its own
def _claim_statement(now_us: str) -> str:
    dialect = dialect_of("postgresql")
    dialect.now_us = now_us
    # One moment for all columns: the clock goes on within a statement.
    values = ["t.us / 1000 + %s" if name in _MOMENTS else "%s" for name in COLUMNS]
    values[TOKEN] = f"greatest(t.us, 1 + %s + {_MARK})"
    # The last is the value, which may be NULL.
    row = f"%s, %s, %s, %s, t.us / 1000 + %s, 0, {', '.join(values)}::bytea"
    # Not left to the conflict alone: that waits for the transaction that is writing the row.
    return (
        f"WITH t AS (SELECT {now_us} AS us),"
        f" n AS (INSERT INTO celery_idempotent_record ({_names(dialect)}) SELECT {row} FROM t"
        " WHERE NOT EXISTS (SELECT 1 FROM celery_idempotent_record WHERE digest = %s)"
        " ON CONFLICT (digest) DO NOTHING RETURNING token, created_ms) SELECT n.token, n.created_ms,"
        f" {_look_columns(dialect)} FROM (SELECT 1) AS one LEFT JOIN n ON true"
        " LEFT JOIN celery_idempotent_record r ON r.digest = %s"
    )
