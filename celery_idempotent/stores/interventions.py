"""What operators did to a record: the last few, each bounded, in as little as they need.

Packed, each is an entry and those that belong to it, in the form of :mod:`.refusals`, whose readers of earlier versions
leave out these kinds. They come behind the refusals, the latest first::

    o   when · the operation, a space, who did it
    s   the name of the step, if it was about one
    w   why: a part of the reason, of up to 250 bytes each
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from celery_idempotent.records import Intervention
from celery_idempotent.stores.refusals import KEPT, WHO_BYTES, cut, entries, pack_entry

#: How many bytes of a reason are stored, and how many of them one entry has.
REASON_BYTES = 500
_PART_BYTES = 250


def with_intervention(
    interventions: tuple[Intervention, ...], new: Intervention | None, now_ms: int
) -> tuple[Intervention, ...]:
    """Return the last few, with one more if there is one; the same again takes the place of its last time."""
    if new is None:
        return interventions
    new = replace(_bounded(new), at_ms=now_ms)
    if interventions and replace(interventions[-1], at_ms=now_ms) == new:
        interventions = interventions[:-1]
    return (*interventions, new)[-KEPT:]


def pack_intervention(new: Intervention | None) -> bytes:
    """Return the entries of an intervention, whose time the store adds; nothing for none."""
    if new is None:
        return b""
    new = _bounded(new)
    packed = pack_entry("o", f"{new.operation} {new.who}".encode())
    if new.step:
        packed += pack_entry("s", new.step.encode())
    reason = new.reason.encode()
    for at in range(0, len(reason), _PART_BYTES):
        packed += pack_entry("w", reason[at : at + _PART_BYTES])
    return packed


def unpack_interventions(packed: bytes) -> tuple[Intervention, ...]:
    """Return the interventions among packed notes, the latest last."""
    return tuple(reversed(list(_unpacked(packed))))


def _unpacked(packed: bytes) -> Iterator[Intervention]:
    """Yield the interventions of packed entries, of which several make one: ``o`` begins it, ``s`` and ``w`` add to it.

    ::

        o "complete alice"   w "ticket 47: € 12"   w " were paid"   o "forget bob"   s "ship"
        └─ complete, by alice, "ticket 47: € 12 were paid" ────┘    └─ forget of step ship, by bob ─┘
    """
    begun: tuple[int, bytes] | None = None
    step = reason = b""
    for kind, at_ms, text in (*entries(packed), ("o", 0, b"")):
        if kind == "o":
            if begun is not None:
                operation, _, who = begun[1].decode(errors="ignore").partition(" ")
                yield Intervention(
                    operation=operation,
                    who=who,
                    step=step.decode(errors="ignore"),
                    reason=reason.decode(errors="ignore"),
                    at_ms=begun[0],
                )
            begun, step, reason = (at_ms, text), b"", b""
        elif kind == "s":
            step = text
        elif kind == "w":
            reason += text


def _bounded(new: Intervention) -> Intervention:
    return replace(
        new,
        who=cut(new.who, WHO_BYTES),
        step=cut(new.step, WHO_BYTES),
        reason=cut(new.reason, REASON_BYTES),
    )
