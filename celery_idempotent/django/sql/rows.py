"""Every statement that reads or writes one record, but for those that do a verb at once.

A look locks nothing. A write names the version that the look found; one that changes no row has met another writer, and
the verb begins again::

    worker A   look: version 3 ─ decide ──────────────────────── UPDATE … version = 3: no row ─ look: version 4 ─ …
    worker B     look: version 3 ─ decide ─ UPDATE … version = 3: one row, now version 4

A released key leaves its row behind, with the state ``R``, until a prune: the next claim of the key writes over it, and
its token goes on growing from there. A row that is deleted leaves its token to the high-water mark of all keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from celery_idempotent.django.sql.columns import (
    LEASE,
    LIVE_LETTERS,
    PRUNE_SLACK_MS,
    READ_LEASE,
    READ_RECORD,
    RECORD,
    RELEASED,
    lease_values,
    pack_steps,
    record_values,
    stored_record,
)
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.sql.holders import end_holder
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, State
from celery_idempotent.stores.deciding import Look, StoredRecord

_SET_RECORD = ", ".join(f"{column} = %s" for column in RECORD)
_SET_LEASE = ", ".join(f"{column} = %s" for column in LEASE)

HIGH_WATER = "(SELECT max(token) FROM celery_idempotent_highwatermark)"
#: Where in a row is the number that says that there is one.
ROW_ID = 2


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
                    (*record_values(after, self.version + 1), prune_ms, self.id, self.version),
                )
                if after.record.token < self.token:
                    # The settled record of a claim that was given back, and claimed again since.
                    session.write(session.words.raise_mark, (self.token,))
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
            (pack_steps(after.record.steps), self.digest, self.lease_version),
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

    def may_take_over(self) -> bool:
        """End the session that is at work; if that is not allowed, its locks would keep our run waiting."""
        return self.stored is None or end_holder(self.session, self.digest, self.stored.record)


def read_columns(key: str = '"key"') -> str:
    """Return what :func:`row_of` reads of ``r`` and ``l``."""
    return f"r.id, r.prune_ms, r.namespace, r.scope, r.{key}, {READ_RECORD}, {READ_LEASE}"


def read(session: Session, name: bytes, identity: Identity | None = None) -> Row:
    """Look at a record without locking anything, in one statement."""
    words = session.words
    level = getattr(session.connection, "isolation_level", None)
    if level == "read uncommitted" and not session.inside:
        # Only MySQL means it. A result that is not committed may never be: the next statement is
        # to see none.
        session.execute("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    (found,) = session.rows(
        f"SELECT {words.now_us}, {HIGH_WATER}, {read_columns(words.key)}"
        " FROM (SELECT 1 AS one) o"
        " LEFT JOIN celery_idempotent_record r ON r.digest = %s"
        " LEFT JOIN celery_idempotent_lease l ON l.digest = %s",
        (name, name),
    )
    return row_of(session, name, identity, found)


def row_of(session: Session, name: bytes, identity: Identity | None, columns: Sequence[Any]) -> Row:
    """Return what a look found: the time, the largest token given back, and what :func:`read_columns` asks for."""
    now_us, mark, row_id, prune_ms, namespace, scope, key, *rest = columns
    record, lease = rest[: len(RECORD)], rest[len(RECORD) :]
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
    # By their places in RECORD and LEASE.
    token, version, state = record[0], record[4], record[7]
    counts = state in LIVE_LETTERS and lease_version is not None and lease[0] == token
    stored = None
    if state != RELEASED:
        stored = stored_record(found, record, lease if counts else None)
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
        lease_version=lease_version,
        lease_counts=counts,
        stored=stored,
    )


def _insert(session: Session, name: bytes, stored: StoredRecord) -> bool:
    """Write the row of a new record, within a transaction; ``False`` if there is one by now."""
    identity = stored.record.identity
    columns = record_values(stored, version=0)
    written = session.write(
        "INSERT INTO celery_idempotent_record"
        f" (digest, prune_ms, namespace, scope, {session.words.key}, {', '.join(RECORD)})"
        f" VALUES ({', '.join(['%s'] * (5 + len(columns)))}){session.words.or_nothing}",
        (name, stored.expires_ms, identity.namespace, identity.scope, identity.key, *columns),
    )
    return written == 1


def _write_lease(row: Row, after: StoredRecord) -> None:
    session = row.session
    if row.lease_version is None:
        columns = ", ".join(LEASE)
        session.expect(
            f"INSERT INTO celery_idempotent_lease (digest, {columns})"
            f" VALUES ({', '.join(['%s'] * (1 + len(LEASE)))})",
            (row.digest, *lease_values(after, 0)),
        )
    else:
        session.expect(
            f"UPDATE celery_idempotent_lease SET {_SET_LEASE} WHERE digest = %s AND version = %s",
            (*lease_values(after, row.lease_version + 1), row.digest, row.lease_version),
        )
