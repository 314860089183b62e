"""A record as a row: columns that statements read, one JSON text that only Python reads, the value's bytes.

What a later version adds to a record goes into the text: it needs no column, no migration, and no line here.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, Record, State, Stored
from celery_idempotent.stores.deciding import StoredRecord
from celery_idempotent.stores.values import LETTERS, STATES, pack_text, pack_value, unpack_value

#: Enough that a second key for a digest cannot be found; a collision would hurt only its maker, and is
#: noticed, for the row keeps the names.
DIGEST_BYTES = 16
#: How much later than its end a row may be looked at by a prune: the indexed time is written again
#: only where it is further away than that.
PRUNE_SLACK_MS = 3_600_000
#: A key that was given back: as if there were no row, but for the token, which must not be given out twice.
RELEASED = "R"
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

#: The fields in JSON, with what they are if they are left out.
_DEFAULTS = {
    each.name: each.default
    for each in fields(Record)
    if each.name not in {"identity", "value", *COLUMNS}
}


def digest(identity: Identity) -> bytes:
    """Return what finds the row of an identity."""
    text = pack_text(identity.namespace) + pack_text(identity.scope) + identity.key.encode()
    return hashlib.sha256(text).digest()[:DIGEST_BYTES]


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
        None if record.value is None else pack_value(record.value),
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
    state = STATES.get(letter)
    if state is None:
        raise StoreMisconfigured(
            f"the record of {identity} was written by a newer version of celery-idempotent:"
            " upgrade this one"
        )
    rest: dict[str, Any] = {
        name: _from_json(value) for name, value in json.loads(data or "{}").items()
    }
    attempt, requeues = rest.pop("attempt", b""), rest.pop("requeues", 0)
    record = Record(
        identity=identity,
        state=state,
        token=token,
        created_ms=created_ms,
        updated_ms=updated_ms,
        deadline_ms=deadline_ms,
        crashes=crashes,
        task_id=task_id,
        value=None if value is None else unpack_value(bytes(value), 0),
        **{name: value for name, value in rest.items() if name in _DEFAULTS},
    )
    return StoredRecord(record, expires_ms, attempt, requeues)


def _text(stored: StoredRecord) -> str:
    record = stored.record
    rest: dict[str, object] = {
        name: value
        for name, default in _DEFAULTS.items()
        if (value := getattr(record, name)) != default
    }
    if stored.attempt:
        rest["attempt"] = stored.attempt
    if stored.requeues:
        rest["requeues"] = stored.requeues
    return json.dumps(rest, default=_to_json, separators=(",", ":"))


def _to_json(value: object) -> object:
    """Return what JSON can say of bytes and of a stored value."""
    if isinstance(value, Stored):
        return {"value": base64.b64encode(pack_value(value)).decode()}
    assert isinstance(value, bytes), type(value)
    return {"bytes": base64.b64encode(value).decode()}


def _from_json(value: Any) -> Any:
    """Return what :func:`_to_json` was given; a list was a tuple."""
    if isinstance(value, list):
        return tuple(map(_from_json, value))
    if not isinstance(value, dict):
        return value
    (form, text), *_ = value.items()
    body = base64.b64decode(text)
    return body if form == "bytes" else unpack_value(body, 0)
