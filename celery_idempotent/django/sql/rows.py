"""From rows to records, and back: every statement that reads or writes one record."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.dialects import Dialect
from celery_idempotent.django.sql.holders import end_holder
from celery_idempotent.django.sql.refusals import note_refusal, split_refusals
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    Identity,
    OnStale,
    Record,
    Refusal,
    RefusalKind,
    State,
    Stored,
)
from celery_idempotent.stores.cas import Look
from celery_idempotent.stores.machine import StoredRecord
from celery_idempotent.stores.values import pack_text, pack_value, unpack_text, unpack_value

__all__ = [
    "DIGEST_BYTES",
    "LETTERS",
    "PRUNE_SLACK_MS",
    "RELEASED",
    "Row",
    "digest",
    "due_ms",
    "read",
    "record_of",
    "summary_columns",
]

#: Enough that a second key for a digest cannot be found; a collision would hurt only its maker, and is
#: noticed, for the row keeps the names.
DIGEST_BYTES = 16
#: How much later than its end a row may be looked at by a prune: the indexed time is written again
#: only where it is further away than that.
PRUNE_SLACK_MS = 3_600_000

LETTERS = {
    State.QUEUED: "Q",
    State.PROCESSING: "P",
    State.INTERRUPTED: "I",
    State.COMPLETED: "C",
    State.FAILED: "F",
}
_STATES = {letter: state for state, letter in LETTERS.items()}
#: A key that was given back: as if there were no row, but for the token, which must not be given out twice.
RELEASED = "R"
_ON_STALE: dict[str, OnStale] = {"i": "interrupt", "f": "fail", "r": "requeue"}

# fmt: off
_RECORD = (
    "token", "created_ms", "updated_ms", "expires_ms", "version", "crashes", "attempts", "state",
    "reserved", "replaced", "delivered", "fingerprint", "task_id", "value",
)
_LEASE = (
    "token", "deadline_ms", "due_ms", "expires_ms", "version", "requeues", "state", "on_stale",
    "attempt", "worker", "message", "steps",
)
# fmt: on
_SET_RECORD = ", ".join(f"{column} = %s" for column in _RECORD)
_SET_LEASE = ", ".join(f"{column} = %s" for column in _LEASE)
_READ_RECORD = ", ".join(f"r.{column}" for column in _RECORD)
_READ_LEASE = ", ".join(f"l.{column}" for column in _LEASE if column not in ("due_ms", "state"))

_READ_REFUSALS = (
    "(SELECT x.entries FROM celery_idempotent_refusals x"
    " WHERE x.digest = r.digest AND x.created_ms = r.created_ms)"
)
_DELETE_REFUSALS = "DELETE FROM celery_idempotent_refusals WHERE digest = %s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row(Look):
    """What one look found, within a session. ``stored`` is what is there for others, ``None`` if it is over.

    ``lease_version`` is the version of whatever lease row there is; ``lease_counts`` tells whether
    it belongs to the record. ``highest`` is the largest token that is known of.
    """

    session: Session
    digest: bytes
    now_us: int
    highest: int
    identity: Identity | None = None
    id: int | None = None
    version: int = 0
    prune_ms: int = 0
    token: int = 0
    created_ms: int = 0
    lease_version: int | None = None
    lease_counts: bool = False
    stored: StoredRecord | None = None

    def write(self, after: StoredRecord) -> None:
        """Write what follows a look; the verb begins again if somebody else wrote in between."""
        session = self.session
        with session.transaction():
            if self.id is None:
                if not _insert(session, self.digest, after):
                    # The next look finds it.
                    session.again()
            else:
                prune_ms = min(self.prune_ms, after.expires_ms + PRUNE_SLACK_MS)
                session.expect(
                    f"UPDATE celery_idempotent_record SET {_SET_RECORD}, prune_ms = %s"
                    " WHERE id = %s AND version = %s",
                    (*_record_values(after, self.version + 1), prune_ms, self.id, self.version),
                )
                if after.record.token < self.token:
                    # The settled record of a claim that was given back, and claimed again since.
                    session.write(session.words.raise_mark, (self.token,))
                if self.stored is None and after.record.created_ms == self.created_ms:
                    # Given back and claimed within a millisecond: its refusals would seem to be ours.
                    session.write(_DELETE_REFUSALS, (self.digest,))
            if after.record.state is State.COMPLETED:
                self.delete_lease()
            else:
                _write_lease(self, after)  # also of a failed one, to be found by operators

    def write_steps(self, after: StoredRecord) -> None:
        """Write the steps alone: the record may be part of the task's own transaction."""
        if not self.lease_counts:
            self.write(after)
            return
        self.session.expect(
            "UPDATE celery_idempotent_lease SET steps = %s, version = version + 1"
            " WHERE digest = %s AND version = %s",
            (_pack_steps(after.record.steps), self.digest, self.lease_version),
        )

    def remove(self, *, forget: bool) -> None:
        """Give the key back, and with ``forget`` delete the row as well; its token is remembered."""
        session = self.session
        with session.transaction():
            if forget:
                session.expect(
                    "DELETE FROM celery_idempotent_record WHERE id = %s AND version = %s",
                    (self.id, self.version),
                )
                session.write(_DELETE_REFUSALS, (self.digest,))
                session.write(session.words.raise_mark, (self.token,))
            else:
                prune_ms = min(self.prune_ms, self.now_us // 1000 + PRUNE_SLACK_MS)
                session.expect(
                    "UPDATE celery_idempotent_record SET state = %s, version = %s, expires_ms = %s,"
                    " prune_ms = %s, value = NULL WHERE id = %s AND version = %s",
                    (
                        RELEASED,
                        self.version + 1,
                        self.now_us // 1000,
                        prune_ms,
                        self.id,
                        self.version,
                    ),
                )
            self.delete_lease()

    def delete_lease(self) -> None:
        """Delete the lease row that the look found, if any."""
        if self.lease_version is not None:
            self.session.expect(
                "DELETE FROM celery_idempotent_lease WHERE digest = %s AND version = %s",
                (self.digest, self.lease_version),
            )

    def refuse(self, kind: RefusalKind, task_id: str) -> None:
        """Note who could not have the key."""
        note_refusal(self, kind, task_id)

    def may_take_over(self) -> bool:
        """End the session that is at work; if that is not allowed, its locks would keep our run waiting."""
        return self.stored is None or end_holder(self.session, self.digest, self.stored.record)


def digest(identity: Identity) -> bytes:
    """Return what finds the rows of an identity."""
    text = pack_text(identity.namespace) + pack_text(identity.scope) + identity.key.encode()
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


def read(
    session: Session, name: bytes, identity: Identity | None = None, *, refusals: bool = False
) -> Row:
    """Look at a record without locking anything, in one statement."""
    words = session.words
    read_refusals = _READ_REFUSALS if refusals else "NULL"
    level = getattr(session.connection, "isolation_level", None)
    if level == "read uncommitted" and not session.inside:
        # Only MySQL means it. A result that is not committed may never be: the next statement is
        # to see none.
        session.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    ((now_us, mark, entries, row_id, prune_ms, namespace, scope, key, *rest),) = session.rows(
        f"SELECT {words.now_us}, (SELECT max(token) FROM celery_idempotent_highwatermark),"
        f" {read_refusals}, r.id, r.prune_ms, r.namespace, r.scope, r.{words.key}, {_READ_RECORD}, {_READ_LEASE}"
        " FROM (SELECT 1 AS one) o"
        " LEFT JOIN celery_idempotent_record r ON r.digest = %s"
        " LEFT JOIN celery_idempotent_lease l ON l.digest = %s",
        (name, name),
    )
    record, lease = rest[: len(_RECORD)], rest[len(_RECORD) :]
    lease_version = lease[3]
    if row_id is None:
        return Row(
            session=session,
            digest=name,
            now_us=now_us,
            highest=mark or 0,
            lease_version=lease_version,
        )
    found = Identity(namespace=namespace, scope=scope, key=key)
    if identity is not None and identity != found:
        raise StoreMisconfigured(f"{identity} and {found} share a digest: one of them was forged")
    token, version, state = record[0], record[4], record[7]
    counts = state in "QPI" and lease_version is not None and lease[0] == token
    stored = None
    if state != RELEASED:
        stored = _stored(found, record, lease if counts else None, split_refusals(entries))
        if stored.expires_ms <= now_us // 1000:
            stored = None
    return Row(
        session=session,
        digest=name,
        now_us=now_us,
        highest=max(mark or 0, token),
        identity=found,
        id=row_id,
        version=version,
        prune_ms=prune_ms,
        token=token,
        created_ms=record[1],
        lease_version=lease_version,
        lease_counts=counts,
        stored=stored,
    )


def _insert(session: Session, name: bytes, stored: StoredRecord) -> bool:
    """Write the row of a new record, within a transaction; ``False`` if there is one by now."""
    identity = stored.record.identity
    columns = _record_values(stored, version=0)
    written = session.write(
        "INSERT INTO celery_idempotent_record"
        f" (digest, prune_ms, namespace, scope, {session.words.key}, {', '.join(_RECORD)})"
        f" VALUES ({', '.join(['%s'] * (5 + len(columns)))}){session.words.or_nothing}",
        (name, stored.expires_ms, identity.namespace, identity.scope, identity.key, *columns),
    )
    return written == 1


def due_ms(record: Record) -> int | None:
    """Return when a sweep has to act: on a lease, or on a message that it can send."""
    if record.state is State.PROCESSING or record.message is not None:
        return record.deadline_ms
    return None


def summary_columns(words: Dialect) -> str:
    """Return what :func:`record_of` reads, of ``r`` and ``l``: all but what was stored."""
    stored = {"r.value": "NULL", "l.message": "NULL", "l.steps": "NULL"}
    columns = f"{_READ_RECORD}, {_READ_LEASE}".split(", ")
    return f"r.namespace, r.scope, r.{words.key}, " + ", ".join(
        stored.get(column, column) for column in columns
    )


def record_of(row: Sequence[Any]) -> Record:
    """Return the record of a row with the summary columns."""
    namespace, scope, key, *rest = row
    record, lease = rest[: len(_RECORD)], rest[len(_RECORD) :]
    live = record[7] in "QPI" and lease[0] is not None
    identity = Identity(namespace=namespace, scope=scope, key=key)
    return _stored(identity, record, lease if live else None).record


def _pack_steps(steps: Sequence[tuple[str, Stored]]) -> bytes | None:
    """Return the steps one after another: length in 4 bytes, name after its length in 2, value."""
    packed = b""
    for name, value in steps:
        step = pack_text(name) + pack_value(value)
        packed += len(step).to_bytes(4, "big") + step
    return packed or None


def _unpack_steps(packed: bytes) -> tuple[tuple[str, Stored], ...]:
    steps, at = [], 0
    while at < len(packed):
        end = at + 4 + int.from_bytes(packed[at : at + 4], "big")
        name, value_at = unpack_text(packed[at + 4 : end], 0)
        steps.append((name, unpack_value(packed[at + 4 : end], value_at)))
        at = end
    return tuple(steps)


def _write_lease(row: Row, after: StoredRecord) -> None:
    session = row.session
    if row.lease_version is None:
        columns = ", ".join(_LEASE)
        session.expect(
            f"INSERT INTO celery_idempotent_lease (digest, {columns})"
            f" VALUES ({', '.join(['%s'] * (1 + len(_LEASE)))})",
            (row.digest, *_lease_values(after, 0)),
        )
    else:
        session.expect(
            f"UPDATE celery_idempotent_lease SET {_SET_LEASE} WHERE digest = %s AND version = %s",
            (*_lease_values(after, row.lease_version + 1), row.digest, row.lease_version),
        )


def _record_values(stored: StoredRecord, version: int) -> tuple[object, ...]:
    record = stored.record
    return (
        record.token,
        record.created_ms,
        record.updated_ms,
        stored.expires_ms,
        version,
        record.crashes,
        record.attempts,
        LETTERS[record.state],
        record.reserved,
        record.replaced,
        record.delivered,
        record.fingerprint,
        record.task_id,
        None if record.value is None else pack_value(record.value),
    )


def _lease_values(stored: StoredRecord, version: int) -> tuple[object, ...]:
    record = stored.record
    return (
        record.token,
        record.deadline_ms,
        due_ms(record),
        stored.expires_ms,
        version,
        stored.requeues,
        LETTERS[record.state],
        record.on_stale[0].upper() if record.uncommitted else record.on_stale[0],
        stored.attempt,
        record.worker,
        record.message,
        _pack_steps(record.steps),
    )


def _stored(
    identity: Identity,
    record: Sequence[Any],
    lease: Sequence[Any] | None,
    refusals: tuple[Refusal, ...] = (),
) -> StoredRecord:
    token, created_ms, updated_ms, expires_ms, _, crashes, attempts, letter = record[:8]
    reserved, replaced, delivered, fingerprint, task_id, value = record[8:]
    state = _STATES.get(letter)
    if state is None:
        raise StoreMisconfigured(
            f"the record of {identity} was written by a newer version of celery-idempotent:"
            " upgrade this one"
        )
    # A live record has a lease, unless it was deleted by hand: then it is stale at once.
    deadline_ms, requeues, on_stale, attempt, worker, message, steps = (
        updated_ms, 0, "i", b"", "", None, None,
    )  # fmt: skip
    if lease is not None:
        _, deadline_ms, expires_ms, _, requeues, on_stale, attempt, worker, message, steps = lease
    live = not state.settled
    return StoredRecord(
        Record(
            identity=identity,
            state=state,
            token=token,
            created_ms=created_ms,
            updated_ms=updated_ms,
            deadline_ms=deadline_ms if live and state is not State.INTERRUPTED else None,
            crashes=crashes,
            attempts=attempts,
            fingerprint=None if fingerprint is None else bytes(fingerprint),
            task_id=task_id,
            worker=worker,
            value=None if value is None else unpack_value(bytes(value), 0),
            replaced=bool(replaced),
            delivered=bool(delivered),
            reserved=bool(reserved),
            uncommitted=on_stale.isupper(),
            on_stale=_ON_STALE.get(on_stale.lower(), "interrupt"),
            message=None if message is None else bytes(message),
            steps=_unpack_steps(bytes(steps)) if steps else (),
        ),
        expires_ms,
        bytes(attempt),
        requeues,
        refusals,
    )
