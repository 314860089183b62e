"""What a store has about a key and how it answers a claim: values that nobody changes, no I/O, no clock.

They are not declared ``frozen=True``: Python would assign each field by a call of ``object.__setattr__``, which takes
three times as long, and a task makes several of them.
"""

from __future__ import annotations

from celery_idempotent.records.lists import Counted, Page, Selection, Stats, SweepReport
from celery_idempotent.records.record import (
    FINGERPRINT_BYTES,
    EndState,
    Identity,
    OnStale,
    Record,
    State,
    Stored,
)
from celery_idempotent.records.verbs import (
    Answer,
    Claimed,
    ClaimRequest,
    Held,
    Mismatched,
    Renewal,
    Reservation,
    Reserved,
    ReserveRequest,
    ResultWrite,
    Settled,
    SettledWith,
    SettleRequest,
)

__all__ = [
    "FINGERPRINT_BYTES",
    "Answer",
    "ClaimRequest",
    "Claimed",
    "Counted",
    "EndState",
    "Held",
    "Identity",
    "Mismatched",
    "OnStale",
    "Page",
    "Record",
    "Renewal",
    "Reservation",
    "ReserveRequest",
    "Reserved",
    "ResultWrite",
    "Selection",
    "SettleRequest",
    "Settled",
    "SettledWith",
    "State",
    "Stats",
    "Stored",
    "SweepReport",
]
