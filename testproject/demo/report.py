"""What came of it, counted from the database and the outcomes: while the demo works, and in the end."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich import box
from rich.live import Live
from rich.table import Table

from testproject.webhooks.figures import Ledger, ledgers

if TYPE_CHECKING:
    from rich.console import Console


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

    @property
    def ok(self) -> bool:
        """Did the idempotent task do what it promises: each delivery there exactly once, and nothing else?"""
        return self.at_rest and not (self.idempotent.too_many or self.missing)

    @property
    def missing(self) -> int:
        """Deliveries that the idempotent task did not enter."""
        return self.deliveries - self.idempotent.distinct

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
        plain, idempotent, found = self.plain, self.idempotent, Counter(self.outcomes)
        noticed = found["interrupted"] - found["swept"]
        rows: list[tuple[object, ...]] = [
            ("HTTP requests accepted", self.accepted, self.accepted),
            ("different deliveries", self.deliveries, self.deliveries),
            ("runs started", plain.runs, idempotent.runs),
            ("  of messages that the broker redelivered", plain.runs - plain.messages, ""),
            ("  that left no row: killed", plain.unfinished, idempotent.unfinished),
            ("duplicates that got the stored result (replays)", "", found["replayed"]),
            ("duplicates that met a running one (conflicts)", "", found["conflicted"]),
            ("crashes noticed by the worker itself", "", noticed),
            ("crashes noticed by a sweep", "", found["swept"]),
        ]
        for row in rows:
            table.add_row(*map(str, row))
        table.add_section()
        _add_effects(table, plain, idempotent, "missing", self.deliveries)
        return table

    def _verdict(self) -> str:
        said = (
            f"{self.deliveries} deliveries came in {self.accepted} requests. celery.Task entered"
            f" them {self.plain.rows} times. IdempotentTask "
        )
        if not (self.idempotent.too_many or self.missing):
            how = ", in one transaction with its record." if self.store != "redis" else "."
            return f"{said}entered each of them exactly once{how}"
        return said + (
            f"entered {self.idempotent.too_many} too many and {self.missing} too few:"
            " that must not happen."
        )


class Progress(Live):
    """Both ledgers side by side on a terminal, and a line for each event, while the demo works."""

    def __init__(self, console: Console, *, requests: int, deliveries: int) -> None:
        super().__init__(console=console, transient=True)  # the report takes its place
        self._requests = requests
        self._deliveries = deliveries
        self._begin = time.monotonic()

    def say(self, text: str) -> None:
        """Print that something happened."""
        since = time.monotonic() - self._begin
        self.console.print(f"{since:5.1f} s  {text}", highlight=False, soft_wrap=True)

    def show(self, *, accepted: int) -> int:
        """Show what is in the ledgers; return how many deliveries are in that of the idempotent task."""
        plain, idempotent = ledgers()
        since = time.monotonic() - self._begin
        table = _table(f"After {since:.0f} s: {accepted} of {self._requests} requests accepted")
        table.box = box.SIMPLE_HEAD
        table.add_row("runs started", str(plain.runs), str(idempotent.runs))
        _add_effects(table, plain, idempotent, "not there yet", self._deliveries)
        self.update(table)
        return idempotent.distinct


def _table(title: str) -> Table:
    table = Table("", title=title, title_justify="left")
    for name in ("celery.Task", "IdempotentTask"):
        table.add_column(name, justify="right")
    return table


def _add_effects(
    table: Table, plain: Ledger, idempotent: Ledger, missing: str, deliveries: int
) -> None:
    both = plain, idempotent
    table.add_row("effects (ledger rows)", *(f"[bold]{each.rows}[/]" for each in both))
    for name, counts in (
        ("too many", [each.too_many for each in both]),
        (missing, [deliveries - each.distinct for each in both]),
    ):
        judged = (f"[red]{count}[/]" if count else "[green]0[/]" for count in counts)
        table.add_row(f"  {name}", *judged)
