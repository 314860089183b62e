"""Who could not have a key: the last few of them, in as little as they need.

Task ids may come from outside, so what is kept of one is bounded. Packed, as the scripts write them, the latest first::

    1 byte   c conflict, m mismatch
    6 bytes  when, ms
    1 byte   length of the task id
    the task id, cut to 100 bytes
"""

from __future__ import annotations

from celery_idempotent.records import Refusal, RefusalKind

__all__ = ["KEPT", "KINDS", "WHO_BYTES", "cut", "unpack_refusals", "with_refusal"]

#: How many a record has at most.
KEPT = 5
#: How many bytes of a task id are stored.
WHO_BYTES = 100

_HEAD_BYTES = 8
#: The letters that stand for the kinds.
KINDS: dict[str, RefusalKind] = {"c": "conflict", "m": "mismatch"}


def cut(task_id: str) -> str:
    """Return what is kept of a task id: whole characters, as many as fit."""
    return task_id.encode()[:WHO_BYTES].decode(errors="ignore")


def with_refusal(
    refusals: tuple[Refusal, ...], kind: RefusalKind, task_id: str, now_ms: int
) -> tuple[Refusal, ...]:
    """Return the last few, with one more; the same one again takes the place of its last time."""
    new = Refusal(kind=kind, at_ms=now_ms, task_id=cut(task_id))
    if refusals and (refusals[-1].kind, refusals[-1].task_id) == (kind, new.task_id):
        refusals = refusals[:-1]
    return (*refusals, new)[-KEPT:]


def unpack_refusals(packed: bytes) -> tuple[Refusal, ...]:
    """Return packed refusals, the latest last; what a later version may call another kind is left out."""
    found, at = [], 0
    while at + _HEAD_BYTES <= len(packed):
        kind = KINDS.get(chr(packed[at]))
        start = at + _HEAD_BYTES
        end = start + packed[start - 1]
        if kind is not None:
            at_ms = int.from_bytes(packed[at + 1 : start - 1], "big")
            who = packed[start:end].decode(errors="ignore")
            found.append(Refusal(kind=kind, at_ms=at_ms, task_id=who))
        at = end
    return tuple(reversed(found))
