"""What the database says happened: every number here is counted from rows."""

from __future__ import annotations

from dataclasses import dataclass

from django.db.models import Count

from testproject.webhooks.models import Kind, LedgerEntry, Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """What became of the deliveries in one of the two ledgers: runs started, of so many messages, and rows written."""

    kind: Kind
    runs: int
    messages: int
    rows: int
    distinct: int

    @property
    def too_many(self) -> int:
        """Rows beside the first one of a delivery."""
        return self.rows - self.distinct

    @property
    def unfinished(self) -> int:
        """Runs without a row: killed, or at work right now."""
        return self.runs - self.rows


def ledgers() -> list[Ledger]:
    """Count both, that of Celery's own task first."""
    found = []
    for kind in Kind:
        runs = Run.objects.filter(kind=kind).aggregate(
            runs=Count("pk"), messages=Count("task_id", distinct=True)
        )
        rows = LedgerEntry.objects.filter(kind=kind).aggregate(
            rows=Count("pk"), distinct=Count("delivery_id", distinct=True)
        )
        found.append(Ledger(kind=kind, **runs, **rows))
    return found
