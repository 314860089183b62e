"""What came of it, counted from the database and the outcomes: while the demo works, and in the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.live import Live
from rich.table import Table

from testproject import counters
from testproject.webhooks.models import Kind, LedgerEntry, Run

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Ledger", "Progress", "Report"]

_LINE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """One ledger, held against the deliveries that belong in it."""

    runs: int
    redelivered: int
    rows: int
    too_many: int
    missing: int

    @classmethod
    def count(cls, kind: Kind, deliveries: Collection[str]) -> Ledger:
        """Count the rows of the database."""
        entries = LedgerEntry.objects.filter(kind=kind).values_list("delivery_id", flat=True)
        rows = Counter(map(str, entries))
        runs = Run.objects.filter(kind=kind)
        expected = set(deliveries)
        started = runs.count()
        return cls(
            runs=started,
            redelivered=started - runs.values("task_id").distinct().count(),
            rows=rows.total(),
            too_many=rows.total() - len(expected & rows.keys()),
            missing=len(expected - rows.keys()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that the demo can say in the end."""

    accepted: int
    deliveries: int
    plain: Ledger
    idempotent: Ledger
    outcomes: dict[str, int]
    worker_kills: int
    process_kills: int
    seconds: float
    seed: int
    at_rest: bool
    store: str
    atomic: bool

    @classmethod
    def count(
        cls,
        *,
        deliveries: Collection[str],
        kills: Sequence[Any],
        directory: Path,
        seconds: float,
        **known: Any,
    ) -> Report:
        """Count, now that nothing moves any more."""
        targets = Counter(target.name for target in kills)
        return cls(
            deliveries=len(deliveries),
            plain=Ledger.count(Kind.PLAIN, deliveries),
            idempotent=Ledger.count(Kind.IDEMPOTENT, deliveries),
            outcomes=dict(counters.count(directory / "outcomes.log")),
            worker_kills=targets["WORKER"],
            process_kills=targets["PROCESS"],
            seconds=round(seconds, 1),
            **known,
        )

    @property
    def ok(self) -> bool:
        """Did the idempotent task do what it promises: each delivery there exactly once, and nothing else?"""
        return self.at_rest and not (self.idempotent.too_many or self.idempotent.missing)

    def as_json(self) -> dict[str, object]:
        return {"ok": self.ok, **asdict(self)}

    def print(self, console: Console) -> None:
        """Print the table and what it means."""
        console.print()
        console.print(self._table())
        console.print(
            f"SIGKILL: {self.worker_kills} × the worker, {self.process_kills} × one of its processes."
            f" Time: {self.seconds:.1f} s. Seed: {self.seed}.",
            highlight=False,
        )
        console.print(self._verdict(), style="bold green" if self.ok else "bold red")
        if not self.at_rest:
            console.print("There was still something to do when time was up.", style="bold red")

    def _table(self) -> Table:
        table = _table("One ledger row per delivery?")
        plain, idempotent, found = self.plain, self.idempotent, self.outcomes
        swept = found.get("swept", 0)
        for name, left, right in (
            ("HTTP requests accepted", self.accepted, self.accepted),
            ("different deliveries", self.deliveries, self.deliveries),
            ("runs started", plain.runs, idempotent.runs),
            ("  of messages that the broker redelivered", plain.redelivered, ""),
            (
                "  that left no row: killed",
                plain.runs - plain.rows,
                idempotent.runs - idempotent.rows,
            ),
            ("duplicates that got the stored result (replays)", "", found.get("replayed", 0)),
            ("duplicates that met a running one (conflicts)", "", found.get("conflicted", 0)),
            ("crashes noticed by the worker itself", "", found.get("interrupted", 0) - swept),
            ("crashes noticed by a sweep", "", swept),
        ):
            table.add_row(name, str(left), str(right))
        table.add_section()
        _add_ledgers(table, plain, idempotent, missing="  missing")
        return table

    def _verdict(self) -> str:
        said = (
            f"{self.deliveries} deliveries came in {self.accepted} requests. celery.Task entered"
            f" them {self.plain.rows} times. IdempotentTask "
        )
        if not (self.idempotent.too_many or self.idempotent.missing):
            how = ", in one transaction with its record." if self.atomic else "."
            return f"{said}entered each of them exactly once{how}"
        return said + (
            f"entered {self.idempotent.too_many} too many and {self.idempotent.missing} too few:"
            " that must not happen."
        )


class Progress:
    """Both ledgers side by side on a terminal, else a line now and then, while the demo works."""

    def __init__(self, console: Console, *, requests: int, deliveries: int) -> None:
        self._console = console
        self._requests = requests
        self._deliveries = deliveries
        self._begin = self._last = time.monotonic()
        # The report takes its place.
        self._live = Live(console=console, transient=True) if console.is_terminal else None

    def __enter__(self) -> Progress:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print that something happened."""
        since = time.monotonic() - self._begin
        self._console.print(f"{since:5.1f} s  {text}", highlight=False, soft_wrap=True)

    def update(self, *, accepted: int) -> int:
        """Show what is in the ledgers; return how many deliveries are in that of the idempotent task."""
        deliveries = set(map(str, LedgerEntry.objects.values_list("delivery_id", flat=True)))
        plain, idempotent = (Ledger.count(kind, deliveries) for kind in Kind)
        now = time.monotonic()
        if self._live:
            table = _table(
                f"After {now - self._begin:.0f} s: {accepted} of {self._requests} requests accepted"
            )
            table.box = box.SIMPLE_HEAD
            table.add_row("runs started", str(plain.runs), str(idempotent.runs))
            _add_ledgers(table, plain, idempotent, missing="  not there yet")
            self._live.update(table)
        elif now - self._last >= _LINE_EVERY_S:
            self._last = now
            self.say(
                f"{accepted} of {self._requests} requests accepted. Rows for {self._deliveries}"
                f" deliveries: celery.Task {plain.rows} ({plain.too_many} too many),"
                f" IdempotentTask {idempotent.rows} ({idempotent.too_many} too many)"
            )
        return len(deliveries) - idempotent.missing


def _table(title: str) -> Table:
    table = Table("", title=title, title_justify="left")
    for name in ("celery.Task", "IdempotentTask"):
        table.add_column(name, justify="right")
    return table


def _add_ledgers(table: Table, plain: Ledger, idempotent: Ledger, *, missing: str) -> None:
    both = plain, idempotent
    table.add_row("effects (ledger rows)", *(f"[bold]{each.rows}[/]" for each in both))
    table.add_row("  too many", *(_judged(each.too_many) for each in both))
    table.add_row(missing, *(_judged(each.missing) for each in both))


def _judged(count: int) -> str:
    return f"[red]{count}[/]" if count else "[green]0[/]"
