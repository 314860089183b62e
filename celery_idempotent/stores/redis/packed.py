"""How a record is packed into one string, as short as it can be: there may be a billion.

All numbers are big-endian and unsigned; offsets count from 1, as Lua does::

    1      state       C COMPLETED, F FAILED, I INTERRUPTED, P PROCESSING, Q QUEUED
    2      flags       1 has a fingerprint
                       C, F: 2 task id is a UUID, 4 has a value, 8 was replaced, 16 is delivered,
                             32 has a note, 64 a sweep settled it
                       P, I, Q: 2 its reservation is not committed, 4 a sweep took it, 16 was reserved,
                             32 fails when stale, 64 is requeued when stale
    3-9    token
    10-15  created, ms
    16-21  updated, ms
    22     crashes     stays at 255
    23     attempts    stays at 255

    P, I, Q:  24-29 deadline, ms · 30-37 id of the attempt that wrote this ·
              [16 bytes fingerprint] · task id and worker, each after its length in 2 bytes ·
              extension: items, each a letter, its length in 4 bytes, its content:
                  M  the message to publish when it is requeued; the first item, if there
                  R  how often it was requeued, 1 byte; after the message, before all others
                  S  a step: its name after its length in 2 bytes, its value (see values.py)
                  X  the note of an operator
              and whatever a later version adds. A new claim brings its own message and carries
              the other items over.
    C, F:     [16 bytes fingerprint] · task id: the 16 bytes of a UUID, else text after its length
              in 2 bytes · [the note, after its length in 2 bytes] · [value, see values.py]

A hash would leave its compact form at fields of 64 bytes and more than double, see docs/benchmarks.md.
The scripts write live records (P, I, Q) themselves; an unknown state or flag was written by a
newer version.
"""

from __future__ import annotations

import re

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    FINGERPRINT_BYTES,
    ClaimRequest,
    Identity,
    OnStale,
    Record,
    ReserveRequest,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.values import STATES, pack_text, pack_value, unpack_text, unpack_value

_STATE_OF_LETTER = {ord(letter): state for letter, state in STATES.items()}
_LETTER_OF_STATE = {state: letter for letter, state in _STATE_OF_LETTER.items()}
_SETTLED = bytes(letter for letter, state in _STATE_OF_LETTER.items() if state.settled)

_HAS_FINGERPRINT = 1
_UUID, _VALUE, _REPLACED, _DELIVERED, _NOTE = 2, 4, 8, 16, 32
_SWEPT_END = 64
_UNCOMMITTED, _SWEPT, _RESERVED, _FAIL, _REQUEUE = 2, 4, 16, 32, 64
_SETTLED_FLAGS = _HAS_FINGERPRINT | _UUID | _VALUE | _REPLACED | _DELIVERED | _NOTE | _SWEPT_END
_LIVE_FLAGS = _HAS_FINGERPRINT | _UNCOMMITTED | _SWEPT | _RESERVED | _FAIL | _REQUEUE
#: What a sweep does with the record once it is stale, as flags.
_ON_STALE_FLAGS: dict[OnStale, int] = {"interrupt": 0, "fail": _FAIL, "requeue": _REQUEUE}
_ON_STALE_WORDS = {flags: word for word, flags in _ON_STALE_FLAGS.items()}

_COMMON_HEAD_BYTES = 23
_LIVE_HEAD_BYTES = 37
_ITEM_HEAD_BYTES = 5
_MESSAGE, _STEP, _NOTED = ord("M"), ord("S"), ord("X")

_CANONICAL_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


def pack_state(state: State) -> bytes:
    """Return the letter that a record in this state begins with."""
    return bytes((_LETTER_OF_STATE[state],))


def pack_token(token: int) -> bytes:
    """Return the token as it stands in a record."""
    return token.to_bytes(7, "big")


def pack_claim(request: ClaimRequest) -> tuple[bytes, bytes]:
    """Return what a claim brings: a live record from the id of its attempt on, and its flags, for a script."""
    flags = _ON_STALE_FLAGS[request.on_stale]
    fingerprint = pack_fingerprint(request.fingerprint)
    if fingerprint:
        flags |= _HAS_FINGERPRINT
    owner = pack_text(request.task_id) + pack_text(request.worker)
    return request.attempt + fingerprint + owner + pack_message(request.message), b"%d" % flags


def unpack_new(request: ClaimRequest, packed: bytes) -> Record:
    """Return the record of a claim that found none; ``packed`` is its token and the time."""
    now_ms = int.from_bytes(packed[7:], "big")
    return Record(
        identity=request.identity,
        state=State.PROCESSING,
        token=int.from_bytes(packed[:7], "big"),
        created_ms=now_ms,
        updated_ms=now_ms,
        deadline_ms=now_ms + request.lease_ms,
        attempts=1,
        fingerprint=request.fingerprint,
        task_id=request.task_id,
        worker=request.worker,
        on_stale=request.on_stale,
        message=request.message,
    )


def pack_reservation_flags(request: ReserveRequest) -> bytes:
    """Return the flags that a reservation brings, as a number for a script."""
    return b"%d" % (_RESERVED | (_UNCOMMITTED if request.uncommitted else 0))


def pack_fingerprint(fingerprint: bytes | None) -> bytes:
    """Return the fingerprint as it stands in a record, nothing if there is none."""
    if fingerprint is not None and len(fingerprint) != FINGERPRINT_BYTES:
        raise ValueError(f"a fingerprint has {FINGERPRINT_BYTES} bytes")
    return fingerprint or b""


def pack_message(message: bytes | None) -> bytes:
    """Return the item with a message, or nothing if there is none."""
    return b"" if message is None else b"M" + len(message).to_bytes(4, "big") + message


def pack_note(note: str) -> bytes:
    """Return the item with the note of an operator, or nothing if there is none."""
    packed = note.encode()
    return b"X" + len(packed).to_bytes(4, "big") + packed if packed else b""


def pack_settled(request: SettleRequest, *, delivered: bool = False) -> bytes:
    """Return the settled form of a record; the script adds what only the store knows: times and counts."""
    record, value, flags = request.record, request.value, 0
    parts = []
    if record.fingerprint is not None:
        flags |= _HAS_FINGERPRINT
        parts.append(record.fingerprint)
    if _CANONICAL_UUID.fullmatch(record.task_id):
        flags |= _UUID
        parts.append(bytes.fromhex(record.task_id.replace("-", "")))
    else:
        parts.append(pack_text(record.task_id))
    note = request.note if request.by_operator else record.note
    if note:
        flags |= _NOTE
        parts.append(pack_text(note))
    if value is not None:
        flags |= _VALUE
        parts.append(pack_value(value))
    if request.replaced:
        flags |= _REPLACED
    if delivered:
        flags |= _DELIVERED
    if request.swept:
        flags |= _SWEPT_END
    head = (
        bytes((_LETTER_OF_STATE[request.state], flags))
        + pack_token(record.token)
        + record.created_ms.to_bytes(6, "big")
        + record.updated_ms.to_bytes(6, "big")
        + bytes((min(record.crashes, 255), min(record.attempts, 255)))
    )
    return head + b"".join(parts)


def unpack_record(identity: Identity, packed: bytes, *, summary: bool = False) -> Record:
    """Return the record that ``packed`` holds; a ``summary`` of its first bytes has no value, message or steps.

    Raises:
        StoreMisconfigured: if it is damaged, or in a form that this version does not know.
    """
    try:
        return _unpack(identity, packed, summary=summary)
    except (IndexError, UnicodeDecodeError) as error:
        raise unreadable(identity) from error


def _unpack(identity: Identity, packed: bytes, *, summary: bool) -> Record:
    state = _STATE_OF_LETTER.get(packed[0]) if len(packed) >= _COMMON_HEAD_BYTES else None
    # By the letter: a sweep unpacks thousands of them.
    settled, flags = packed[0] in _SETTLED, packed[1]
    if state is None or flags & ~(_SETTLED_FLAGS if settled else _LIVE_FLAGS):
        raise unreadable(identity)
    at = _COMMON_HEAD_BYTES if settled else _LIVE_HEAD_BYTES
    fingerprint = None
    if flags & _HAS_FINGERPRINT:
        fingerprint = packed[at : at + FINGERPRINT_BYTES]
        at += FINGERPRINT_BYTES
    worker, value, deadline_ms = "", None, None
    message: bytes | None = None
    steps: tuple[tuple[str, Stored], ...] = ()
    note = ""
    live = 0
    if settled:
        task_id, at = _unpack_task_id(packed, at, flags)
        if flags & _NOTE and not summary:
            note, at = unpack_text(packed, at)
        value = unpack_value(packed, at) if flags & _VALUE and not summary else None
    else:
        live = flags
        task_id, at = unpack_text(packed, at)
        worker, at = unpack_text(packed, at)
        if at < len(packed) and not summary:
            message, steps, note = _unpack_extension(identity, packed, at)
        if state is not State.INTERRUPTED:
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
        delivered=settled and bool(flags & _DELIVERED),
        reserved=bool(live & _RESERVED),
        uncommitted=bool(live & _UNCOMMITTED),
        swept=bool(flags & _SWEPT_END if settled else live & _SWEPT),
        on_stale=_ON_STALE_WORDS.get(live & (_FAIL | _REQUEUE), "interrupt"),
        message=message,
        steps=steps,
        note=note,
    )


def state_of(packed: bytes) -> State | None:
    """Return the state of a packed record without taking the rest apart, ``None`` if it is not known here."""
    return _STATE_OF_LETTER.get(packed[0])


def unreadable(identity: Identity) -> StoreMisconfigured:
    """Return the error for a record in a form that this version does not know."""
    return StoreMisconfigured(
        f"the record of {identity} is damaged, or was written by a newer version of celery-idempotent:"
        " upgrade this one"
    )


def _unpack_task_id(packed: bytes, at: int, flags: int) -> tuple[str, int]:
    if not flags & _UUID:
        return unpack_text(packed, at)
    digits = packed[at : at + 16].hex()
    text = f"{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:]}"
    return text, at + 16


def _unpack_extension(
    identity: Identity, packed: bytes, at: int
) -> tuple[bytes | None, tuple[tuple[str, Stored], ...], str]:
    """Return the message, the steps and the note; items of other kinds are those of a newer version."""
    message: bytes | None = None
    steps: list[tuple[str, Stored]] = []
    note = ""
    while at < len(packed):
        start = at + _ITEM_HEAD_BYTES
        kind, at = packed[at], start + int.from_bytes(packed[at + 1 : start], "big")
        if at > len(packed):
            raise unreadable(identity)
        if kind == _MESSAGE:
            message = packed[start:at]
        elif kind == _STEP:
            step = packed[start:at]
            name, value_at = unpack_text(step, 0)
            steps.append((name, unpack_value(step, value_at)))
        elif kind == _NOTED:
            note = packed[start:at].decode()
    return message, tuple(steps), note
