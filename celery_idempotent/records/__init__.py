"""What a store has about a key and how it answers a claim: frozen values, no I/O, no clock."""

from __future__ import annotations

from celery_idempotent.records.lists import Counted, Page, Selection, Stats, SweepReport
from celery_idempotent.records.record import (
    FINGERPRINT_BYTES,
    EndState,
    Identity,
    Intervention,
    OnStale,
    Record,
    Refusal,
    RefusalKind,
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
    Retained,
    Settled,
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
    "Intervention",
    "Mismatched",
    "OnStale",
    "Page",
    "Record",
    "Refusal",
    "RefusalKind",
    "Renewal",
    "Reservation",
    "ReserveRequest",
    "Reserved",
    "Retained",
    "Selection",
    "SettleRequest",
    "Settled",
    "State",
    "Stats",
    "Stored",
    "SweepReport",
]
