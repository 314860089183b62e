"""How a record is packed into one string, as short as it can be: there may be a billion.

All numbers are big-endian and unsigned; offsets count from 1, as Lua does::

    1      state       C COMPLETED, F FAILED, I INTERRUPTED, P PROCESSING
    2      flags       1 has a fingerprint, 2 task id is a UUID, 4 has a value, 8 was replaced
    3-9    token
    10-15  created, ms
    16-21  updated, ms
    22     crashes     stays at 255
    23     attempts    stays at 255

    P, I:  24-29 deadline, ms · 30-37 attempt id · [16 bytes fingerprint] · task id and worker, each
    after its
           length in 2 bytes · extension: whatever a later version adds; a new claim carries it over
    C, F:  [16 bytes fingerprint] · task id: the 16 bytes of a UUID, else text after its length in 2
    bytes ·
           [value: 1 byte for a known pair of content type and encoding, or 0 and the two, each
           after its length in 2 bytes; then the body to the end]

A hash would leave its compact form at fields of 64 bytes and more than double (MEASUREMENTS §2).
The scripts write PROCESSING and INTERRUPTED records themselves; an unknown state or flag was
written by a newer version.
"""

from __future__ import annotations

import re

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import FINGERPRINT_BYTES, Identity, Record, State, Stored

__all__ = ["pack_owner", "pack_settled", "pack_token", "unpack", "unreadable"]

_STATES = {
    ord("C"): State.COMPLETED,
    ord("F"): State.FAILED,
    ord("I"): State.INTERRUPTED,
    ord("P"): State.PROCESSING,
}
_LETTERS = {state: letter for letter, state in _STATES.items()}

_FINGERPRINT, _UUID, _VALUE, _REPLACED = 1, 2, 4, 8
_KNOWN_FLAGS = _FINGERPRINT | _UUID | _VALUE | _REPLACED
_HEAD_BYTES = 23
_LIVE_HEAD_BYTES = 37

#: One byte each for what kombu's serializers write. Numbers are stored: add, never change.
_CONTENT = {
    1: ("application/json", "utf-8"),
    2: ("application/x-python-serialize", "binary"),
    3: ("application/x-msgpack", "binary"),
    4: ("application/x-yaml", "utf-8"),
    5: ("application/data", "binary"),
    6: ("text/plain", "utf-8"),
    7: ("application/data", "utf-8"),
}
_CONTENT_CODES = {pair: code for code, pair in _CONTENT.items()}
_OTHER_CONTENT = 0

_CANONICAL_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def pack_token(token: int) -> bytes:
    """Return the token as it stands in a record."""
    return token.to_bytes(7, "big")


def pack_owner(task_id: str, worker: str) -> bytes:
    """Return the part of a PROCESSING record that names its owner."""
    return _pack_text(task_id) + _pack_text(worker)


def pack_settled(record: Record, *, state: State, value: Stored | None, replaced: bool) -> bytes:
    """Return the record as it is once settled; the script puts in what only the store knows."""
    flags = 0
    parts = []
    if record.fingerprint is not None:
        flags |= _FINGERPRINT
        parts.append(record.fingerprint)
    if _CANONICAL_UUID.fullmatch(record.task_id):
        flags |= _UUID
        parts.append(bytes.fromhex(record.task_id.replace("-", "")))
    else:
        parts.append(_pack_text(record.task_id))
    if value is not None:
        flags |= _VALUE
        parts.append(_pack_content(value.content_type, value.content_encoding))
        parts.append(value.body)
    if replaced:
        flags |= _REPLACED
    head = (
        bytes((_LETTERS[state], flags))
        + pack_token(record.token)
        + record.created_ms.to_bytes(6, "big")
        + record.updated_ms.to_bytes(6, "big")
        + bytes((min(record.crashes, 255), min(record.attempts, 255)))
    )
    return head + b"".join(parts)


def unpack(identity: Identity, packed: bytes) -> Record:
    """Return the record that ``packed`` holds."""
    state = _STATES.get(packed[0]) if len(packed) >= _HEAD_BYTES else None
    if state is None or packed[1] & ~_KNOWN_FLAGS:
        raise unreadable(identity)
    flags = packed[1]
    at = _HEAD_BYTES if state.settled else _LIVE_HEAD_BYTES
    fingerprint = None
    if flags & _FINGERPRINT:
        fingerprint = packed[at : at + FINGERPRINT_BYTES]
        at += FINGERPRINT_BYTES
    worker, value, deadline_ms = "", None, None
    if state.settled:
        task_id, at = _unpack_task_id(packed, at, flags)
        value = _unpack_value(packed, at) if flags & _VALUE else None
    else:
        task_id, at = _unpack_text(packed, at)
        worker, at = _unpack_text(packed, at)
        if state is State.PROCESSING:
            deadline_ms = int.from_bytes(packed[23:29], "big")
    return Record(
        identity=identity,
        state=state,
        token=int.from_bytes(packed[2:9], "big"),
        created_ms=int.from_bytes(packed[9:15], "big"),
        updated_ms=int.from_bytes(packed[15:21], "big"),
        deadline_ms=deadline_ms,
        crashes=packed[21],
        attempts=packed[22],
        fingerprint=fingerprint,
        task_id=task_id,
        worker=worker,
        value=value,
        replaced=bool(flags & _REPLACED),
    )


def unreadable(identity: Identity) -> StoreMisconfigured:
    """Return the error for a record in a form that this version does not know."""
    return StoreMisconfigured(
        f"the record of {identity} was written by a newer version of celery-idempotent:"
        " upgrade this one"
    )


def _unpack_task_id(packed: bytes, at: int, flags: int) -> tuple[str, int]:
    if not flags & _UUID:
        return _unpack_text(packed, at)
    digits = packed[at : at + 16].hex()
    text = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return text, at + 16


def _unpack_value(packed: bytes, at: int) -> Stored:
    code = packed[at]
    at += 1
    if code == _OTHER_CONTENT:
        content_type, at = _unpack_text(packed, at)
        content_encoding, at = _unpack_text(packed, at)
    elif code in _CONTENT:
        content_type, content_encoding = _CONTENT[code]
    else:
        raise StoreMisconfigured(
            f"a value of content code {code} was written by a newer version of celery-idempotent:"
            " upgrade this one"
        )
    return Stored(content_type=content_type, content_encoding=content_encoding, body=packed[at:])


def _pack_content(content_type: str, content_encoding: str) -> bytes:
    code = _CONTENT_CODES.get((content_type, content_encoding), _OTHER_CONTENT)
    if code != _OTHER_CONTENT:
        return bytes((code,))
    return bytes((code,)) + _pack_text(content_type) + _pack_text(content_encoding)


def _pack_text(text: str) -> bytes:
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


def _unpack_text(packed: bytes, at: int) -> tuple[str, int]:
    end = at + 2 + int.from_bytes(packed[at : at + 2], "big")
    return packed[at + 2 : end].decode(), end
