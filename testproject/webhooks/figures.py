"""What the database says happened: every number here is counted from rows."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count

from testproject.webhooks.models import EventCounter, Kind, LedgerEntry, Receipt, Run

__all__ = ["Deliveries", "EventRow", "Ledger", "deliveries", "events", "ledger", "ledgers"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Deliveries:
    """HTTP requests that were accepted, and how many different deliveries they were."""

    accepted: int
    distinct: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What became of the deliveries in one of the two ledgers."""

    kind: Kind
    runs: int
    rows: int
    distinct: int

    @property
    def duplicates(self) -> int:
        """Rows too many."""
        return self.rows - self.distinct

    @property
    def unfinished(self) -> int:
        """Runs without a row: killed, or at work right now."""
        return self.runs - self.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class EventRow:
    """The two counters of an event type."""

    event: str
    plain: int
    idempotent: int


def deliveries() -> Deliveries:
    counted = Receipt.objects.aggregate(
        accepted=Count("pk"), distinct=Count("delivery_id", distinct=True)
    )
    return Deliveries(**counted)


def ledger(kind: Kind) -> Ledger:
    counted = LedgerEntry.objects.filter(kind=kind).aggregate(
        rows=Count("pk"), distinct=Count("delivery_id", distinct=True)
    )
    return Ledger(kind=kind, runs=Run.objects.filter(kind=kind).count(), **counted)


def ledgers() -> list[Ledger]:
    return [ledger(Kind.PLAIN), ledger(Kind.IDEMPOTENT)]


def events() -> list[EventRow]:
    counts: dict[str, dict[str, int]] = {}
    for counter in EventCounter.objects.order_by("event"):
        counts.setdefault(counter.event, {})[counter.kind] = counter.count
    return [
        EventRow(event=event, plain=by.get(Kind.PLAIN, 0), idempotent=by.get(Kind.IDEMPOTENT, 0))
        for event, by in counts.items()
    ]
