"""What the database says happened: every number here is counted from rows."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count

from testproject.webhooks.models import Kind, LedgerEntry, Run

__all__ = ["Ledger", "ledgers"]


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


def ledgers() -> list[Ledger]:
    """Count both, that of Celery's own task first."""
    found = []
    for kind in Kind:
        counted = LedgerEntry.objects.filter(kind=kind).aggregate(
            rows=Count("pk"), distinct=Count("delivery_id", distinct=True)
        )
        found.append(Ledger(kind=kind, runs=Run.objects.filter(kind=kind).count(), **counted))
    return found
