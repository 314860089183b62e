"""What came of it: counted from the database and the outcomes, as a table, a sentence or JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Table

from testproject import counters
from testproject.demo.chaos import PLACES, Strike, Target
from testproject.demo.scene import Scene
from testproject.demo.show import judged
from testproject.webhooks.models import Kind, LedgerEntry, Run
from testproject.webhooks.tasks import record_delivery

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["LedgerReport", "Report", "make_report"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerReport:
    """One ledger, held against the deliveries that belong in it; ``killed`` counts runs by place."""

    runs: int
    redelivered: int
    killed: dict[str, int]
    rows: int
    too_many: int
    missing: int

    @property
    def right(self) -> bool:
        """Is each delivery there exactly once, and nothing else?"""
        return not (self.too_many or self.missing)


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the demo can say in the end."""

    requests: int
    accepted: int
    deliveries: int
    plain: LedgerReport
    idempotent: LedgerReport
    outcomes: dict[str, int]
    sweeps: int
    swept: int
    worker_kills: int
    process_kills: int
    seconds: float
    seed: int
    at_rest: bool
    scene: Scene

    @property
    def ok(self) -> bool:
        """Did the idempotent task do what it promises?"""
        return self.at_rest and self.idempotent.right

    def as_json(self) -> dict[str, object]:
        return {"ok": self.ok, "atomic": self.scene.atomic, **asdict(self)}

    def print(self, console: Console) -> None:
        """Print the table and what it means."""
        console.print()
        console.print(self._table())
        console.print(self._what_happened(), highlight=False)
        console.print(self._verdict(), style="bold green" if self.ok else "bold red")
        if not self.at_rest:
            console.print("There was still something to do when time was up.", style="bold red")

    def _table(self) -> Table:
        table = Table(title="One ledger row per delivery?", title_justify="left")
        table.add_column("")
        table.add_column("celery.Task", justify="right")
        table.add_column("IdempotentTask", justify="right")
        plain, idempotent = self.plain, self.idempotent
        for name, left, right in (
            ("HTTP requests accepted", self.accepted, self.accepted),
            ("different deliveries", self.deliveries, self.deliveries),
            ("runs started", plain.runs, idempotent.runs),
            ("  of messages that the broker redelivered", plain.redelivered, None),
            *(
                (f"  killed {name}", plain.killed[place], idempotent.killed[place])
                for place, name in PLACES.items()
            ),
            ("duplicates that got the stored result (replays)", None, self._outcome("replayed")),
            ("duplicates that met a running one (conflicts)", None, self._outcome("conflicted")),
            (
                "crashes noticed by the worker itself",
                None,
                self._outcome("interrupted") - self.swept,
            ),
            ("crashes noticed by a sweep", None, self.swept),
        ):
            table.add_row(name, _number(left), _number(right))
        table.add_section()
        for name, left, right in (
            ("ledger rows", plain.rows, idempotent.rows),
            ("  too many", plain.too_many, idempotent.too_many),
            ("  missing", plain.missing, idempotent.missing),
        ):
            table.add_row(name, _judged(name, left), _judged(name, right))
        return table

    def _what_happened(self) -> str:
        return (
            f"SIGKILL: {self.worker_kills} × the worker, {self.process_kills} × one of its"
            f" processes. Sweeps: {self.sweeps}. Time: {self.seconds:.1f} s. Seed: {self.seed}."
        )

    def _verdict(self) -> str:
        told = (
            f"{self.deliveries} deliveries came in {self.accepted} requests. celery.Task entered"
            f" them {self.plain.rows} times. IdempotentTask "
        )
        if self.idempotent.right:
            how = ", in one transaction with its record." if self.scene.atomic else "."
            return f"{told}entered each of them exactly once{how}"
        return told + (
            f"entered {self.idempotent.too_many} too many and {self.idempotent.missing} too few:"
            " that must not happen."
        )

    def _outcome(self, name: str) -> int:
        return self.outcomes.get(name, 0)


def make_report(
    *,
    requests: int,
    accepted: int,
    deliveries: Collection[str],
    strikes: Sequence[Strike],
    outcomes: Path,
    seconds: float,
    seed: int,
    at_rest: bool,
    scene: Scene,
) -> Report:
    """Count, now that nothing moves any more."""
    counted = counters.count(outcomes, task=record_delivery.name)
    sweeps = counters.count(outcomes)["swept"]
    targets = Counter(strike.target for strike in strikes)
    return Report(
        requests=requests,
        accepted=accepted,
        deliveries=len(deliveries),
        plain=_ledger(Kind.PLAIN, deliveries, strikes),
        idempotent=_ledger(Kind.IDEMPOTENT, deliveries, strikes),
        outcomes=dict(counted),
        sweeps=sweeps,
        swept=counters.swept(outcomes),
        worker_kills=targets[Target.WORKER],
        process_kills=targets[Target.PROCESS],
        seconds=round(seconds, 1),
        seed=seed,
        at_rest=at_rest,
        scene=scene,
    )


def _ledger(kind: Kind, deliveries: Collection[str], strikes: Sequence[Strike]) -> LedgerReport:
    entries = LedgerEntry.objects.filter(kind=kind).values_list("delivery_id", flat=True)
    rows = Counter(map(str, entries))
    runs = Run.objects.filter(kind=kind)
    expected = set(deliveries)
    killed = Counter(place for strike in strikes for place in strike.killed(kind).elements())
    return LedgerReport(
        runs=runs.count(),
        redelivered=runs.count() - runs.values("task_id").distinct().count(),
        killed={place: killed[place] for place in PLACES},
        rows=rows.total(),
        too_many=rows.total() - len(expected & rows.keys()),
        missing=len(expected - rows.keys()),
    )


def _number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _judged(name: str, value: int) -> str:
    if name == "ledger rows":
        return f"[bold]{value:,}[/]"
    return judged(value)
