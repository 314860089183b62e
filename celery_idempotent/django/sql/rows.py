"""A record as a row: columns that statements read, one JSON text that only Python reads, the value's bytes.

What a later version adds to a record goes into the text: it needs no column, no migration, and no line here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, Record, State
from celery_idempotent.stores.fields import LETTERS, STATES, FieldCodec
from celery_idempotent.stores.table import LIVE, StoredRecord

#: Enough that a second key for a digest cannot be found; a collision would hurt only its maker, and is
#: noticed, for the row keeps the names.
DIGEST_BYTES = 16
#: How much later than its end a row may be looked at by a prune: the indexed time is written again
#: only where it is further away than that.
PRUNE_SLACK_MS = 3_600_000
#: A key that was given back: as if there were no row, but for the token, which must not be given out twice.
RELEASED = "R"


def _any_of(*states: State) -> str:
    letters = ", ".join(f"'{LETTERS[state]}'" for state in states)
    return f"state IN ({letters})"


#: What the partial index of unfinished and failed keys is of; SQLite takes it only by its own words.
UNFINISHED = _any_of(*(state for state in State if state is not State.COMPLETED))
#: A claim whose owner may settle it, whatever became of its lease; also one that a sweep failed: the token decides.
OPEN = f"({_any_of(*LIVE)} OR (state = 'F' AND data LIKE '%%\"swept\":true%%'))"

#: The columns that are written together, in this order.
COLUMNS = (
    "state", "token", "created_ms", "updated_ms", "deadline_ms", "due_ms", "expires_ms", "crashes", "task_id", "data",
    "value",
)  # fmt: skip
#: The places of those that a look at the row itself needs.
STATE, TOKEN, DEADLINE, EXPIRES = (
    COLUMNS.index(name) for name in ("state", "token", "deadline_ms", "expires_ms")
)

_CODEC = FieldCodec("fingerprint", *COLUMNS, ascii_only=True)
_NAMES = (*(name for name in _CODEC.defaults if name != "requeues"), "message", "steps", "value")
#: Bytes in the line, as hexadecimal digits.
_IDS = ("fingerprint", "attempt")


def digest(identity: Identity) -> bytes:
    """Return what finds the row of an identity."""
    text = _sized(identity.namespace) + _sized(identity.scope) + identity.key.encode()
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


def _sized(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


def column_values(stored: StoredRecord) -> tuple[object, ...]:
    """Return what :data:`COLUMNS` are for a record."""
    record = stored.record
    # A sweep has to act on a lease, or on a message that it can send.
    due = record.state is State.PROCESSING or record.message is not None
    return (
        LETTERS[record.state],
        record.token,
        record.created_ms,
        record.updated_ms,
        record.deadline_ms,
        record.deadline_ms if due else None,
        stored.expires_ms,
        record.crashes,
        record.task_id,
        _text(stored),
        None if record.value is None else record.value.body,
    )


def stored_record(identity: Identity, row: Sequence[Any]) -> StoredRecord:
    """Return the record of a row with :data:`COLUMNS`.

    Raises:
        StoreMisconfigured: if a newer version wrote it.
    """
    (
        letter,
        token,
        created_ms,
        updated_ms,
        deadline_ms,
        _,
        expires_ms,
        crashes,
        task_id,
        data,
        value,
    ) = row
    try:
        state, body = STATES[letter], None if value is None else bytes(value)
        rest = _CODEC.decode((data or "").encode(), body)
        rest.update({name: bytes.fromhex(rest[name]) for name in _IDS if name in rest})
        attempt, requeues = rest.pop("attempt", b""), rest.pop("requeues", 0)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMisconfigured(
            f"the record of {identity} is damaged, or was written by a newer version of celery-idempotent: upgrade"
            " this one"
        ) from error
    record = Record(
        identity=identity,
        state=state,
        token=token,
        created_ms=created_ms,
        updated_ms=updated_ms,
        deadline_ms=deadline_ms,
        crashes=crashes,
        task_id=task_id,
        **rest,
    )
    return StoredRecord(record, expires_ms, attempt, requeues)


def _text(stored: StoredRecord) -> str:
    record = stored.record
    fields = {name: getattr(record, name) for name in _NAMES} | {"requeues": stored.requeues}
    ids = {"fingerprint": record.fingerprint, "attempt": stored.attempt}
    return _CODEC.encode(fields, {name: each.hex() for name, each in ids.items() if each}).decode()
