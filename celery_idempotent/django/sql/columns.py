"""From the columns of a record's rows to the record, and back.

A record is one row, and while it has not ended well a second one, the lease row, beside it::

    celery_idempotent_record   token, state, task_id, value, …       written at a claim and at an end
    celery_idempotent_lease    token, deadline_ms, steps, message    written at each renewal and step as well

They are apart for atomic tasks: the transaction of such a run has locked the record's row, and the heartbeat renews the
lease row meanwhile. A lease row that was left behind does not count: its token is not the record's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from celery_idempotent.django.sql.dialects import Dialect
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    Identity,
    OnStale,
    Record,
    State,
    Stored,
)
from celery_idempotent.stores.deciding import StoredRecord
from celery_idempotent.stores.values import (
    LETTERS,
    STATES,
    pack_text,
    pack_value,
    unpack_text,
    unpack_value,
)

#: Enough that a second key for a digest cannot be found; a collision would hurt only its maker, and is
#: noticed, for the row keeps the names.
DIGEST_BYTES = 16
#: How much later than its end a row may be looked at by a prune: the indexed time is written again
#: only where it is further away than that.
PRUNE_SLACK_MS = 3_600_000

#: The letters of unfinished records, and what selects their rows, and those that have ended.
LIVE_LETTERS = [letter for state, letter in LETTERS.items() if not state.settled]
LIVE_SQL = f"state IN ({', '.join(map(repr, LIVE_LETTERS))})"
ENDED = (
    f"state IN ({', '.join(repr(letter) for state, letter in LETTERS.items() if state.settled)})"
)
#: A key that was given back: as if there were no row, but for the token, which must not be given out twice.
RELEASED = "R"
#: A row as it was read: its columns have types of their own.
ColumnValues = Sequence[Any]
ReadRows = list[tuple[Any, ...]]

_ON_STALE: dict[str, OnStale] = {"i": "interrupt", "f": "fail", "r": "requeue"}

# Both tuples are the order in which rows are read and written. `version` is each row's own: a write names the version
# that was seen. `prune_ms`, `digest` and the three names are not among them, since they are read or written apart.
# fmt: off
RECORD = (
    "token", "created_ms", "updated_ms", "expires_ms", "version", "crashes", "attempts", "state",
    "reserved", "replaced", "delivered", "swept", "fingerprint", "task_id", "value", "note",
)
LEASE = (
    "token", "deadline_ms", "due_ms", "expires_ms", "version", "requeues", "state", "on_stale",
    "attempt", "worker", "message", "steps",
)
# fmt: on
READ_RECORD = ", ".join(f"r.{column}" for column in RECORD)
READ_LEASE = ", ".join(f"l.{column}" for column in LEASE if column not in ("due_ms", "state"))


def digest(identity: Identity) -> bytes:
    """Return what finds the rows of an identity."""
    text = pack_text(identity.namespace) + pack_text(identity.scope) + identity.key.encode()
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


def due_ms(record: Record) -> int | None:
    """Return when a sweep has to act: on a lease, or on a message that it can send."""
    if record.state is State.PROCESSING or record.message is not None:
        return record.deadline_ms
    return None


def summary_columns(words: Dialect) -> str:
    """Return what :func:`record_of` reads, of ``r`` and ``l``: all but what was stored."""
    unread = ("r.value", "l.message", "l.steps")
    columns = f"{READ_RECORD}, {READ_LEASE}".split(", ")
    return f"r.namespace, r.scope, r.{words.key}, " + ", ".join(
        "NULL" if column in unread else column for column in columns
    )


def record_of(row: ColumnValues) -> Record:
    """Return the record of a row with the summary columns."""
    namespace, scope, key, *rest = row
    record, lease = rest[: len(RECORD)], rest[len(RECORD) :]
    live = record[7] in LIVE_LETTERS and lease[0] is not None
    identity = Identity(namespace=namespace, scope=scope, key=key)
    return stored_record(identity, record, lease if live else None).record


def record_values(stored: StoredRecord, version: int) -> tuple[object, ...]:
    """Return what the columns of :data:`RECORD` are for a record."""
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
        record.swept,
        record.fingerprint,
        record.task_id,
        None if record.value is None else pack_value(record.value),
        record.note,
    )


def lease_values(stored: StoredRecord, version: int) -> tuple[object, ...]:
    """Return what the columns of :data:`LEASE` are for a record."""
    record = stored.record
    return (
        record.token,
        record.deadline_ms,
        due_ms(record),
        stored.expires_ms,
        version,
        stored.requeues,
        LETTERS[record.state],
        # "i", "f" or "r"; in capitals while its transaction is open. So that took no column, and no migration.
        record.on_stale[0].upper() if record.uncommitted else record.on_stale[0],
        stored.attempt,
        record.worker,
        record.message,
        pack_steps(record.steps),
    )


def stored_record(
    identity: Identity,
    record: ColumnValues,
    lease: ColumnValues | None,
) -> StoredRecord:
    """Return the record of what was read; ``lease``: of its lease row, if that counts."""
    token, created_ms, updated_ms, expires_ms, _, crashes, attempts, letter = record[:8]
    reserved, replaced, delivered, swept, fingerprint, task_id, value, note = record[8:]
    state = STATES.get(letter)
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
            swept=bool(swept),
            on_stale=_ON_STALE.get(on_stale.lower(), "interrupt"),
            message=None if message is None else bytes(message),
            steps=_unpack_steps(bytes(steps)) if steps else (),
            note=note,
        ),
        expires_ms,
        bytes(attempt),
        requeues,
    )


def pack_steps(steps: Sequence[tuple[str, Stored]]) -> bytes | None:
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
