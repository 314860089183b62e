"""Who could not have a key: the last few of them, in as little as they need.

Task ids may come from outside, so what is kept of one is bounded. Packed, as the scripts write them, the latest first::

    1 byte   c conflict, m mismatch
    6 bytes  when, ms
    1 byte   length of the task id
    the task id, cut to 100 bytes
"""

from __future__ import annotations

from collections.abc import Iterator

from celery_idempotent.records import Refusal, RefusalKind

__all__ = [
    "KEPT",
    "KINDS",
    "WHO_BYTES",
    "cut",
    "entries",
    "pack_entry",
    "unpack_refusals",
    "with_refusal",
]

#: How many a record has at most.
KEPT = 5
#: How many bytes of a task id are stored.
WHO_BYTES = 100

_HEAD_BYTES = 8
#: The letters that stand for the kinds.
KINDS: dict[str, RefusalKind] = {"c": "conflict", "m": "mismatch"}


def cut(text: str, longest: int = WHO_BYTES) -> str:
    """Return what is kept of a text: whole characters, as many as fit into so many bytes."""
    return text.encode(errors="replace")[:longest].decode(errors="ignore")


def with_refusal(
    refusals: tuple[Refusal, ...], kind: RefusalKind, task_id: str, now_ms: int
) -> tuple[Refusal, ...]:
    """Return the last few, with one more; the same one again takes the place of its last time."""
    new = Refusal(kind=kind, at_ms=now_ms, task_id=cut(task_id))
    if refusals and (refusals[-1].kind, refusals[-1].task_id) == (kind, new.task_id):
        refusals = refusals[:-1]
    return (*refusals, new)[-KEPT:]


def unpack_refusals(packed: bytes) -> tuple[Refusal, ...]:
    """Return the refusals among packed notes, the latest last; other kinds are left out."""
    found = [
        Refusal(kind=KINDS[kind], at_ms=at_ms, task_id=who.decode(errors="ignore"))
        for kind, at_ms, who in entries(packed)
        if kind in KINDS
    ]
    return tuple(reversed(found))


def entries(packed: bytes) -> Iterator[tuple[str, int, bytes]]:
    """Yield kind, time and text of each packed note."""
    at = 0
    while at + _HEAD_BYTES <= len(packed):
        start = at + _HEAD_BYTES
        end = start + packed[start - 1]
        at_ms = int.from_bytes(packed[at + 1 : start - 1], "big")
        yield chr(packed[at]), at_ms, packed[start:end]
        at = end


def pack_entry(kind: str, text: bytes) -> bytes:
    """Return a note whose time is added by the store."""
    return kind.encode() + bytes(6) + bytes((len(text),)) + text
