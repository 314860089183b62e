"""What is to be seen while the demo works: both ledgers side by side on a terminal, else a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich import box
from rich.console import Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from testproject.webhooks.figures import Ledger

__all__ = ["Show", "judged", "show_on"]

_LINE_EVERY_S = 2.0


class Show(Protocol):
    """Tells people how far it is."""

    def __enter__(self) -> Show: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def say(self, text: str) -> None:
        """Something happened."""

    def update(self, *, accepted: int, plain: Ledger, idempotent: Ledger) -> None:
        """So many requests were accepted, and this is in the ledgers."""


def show_on(console: Console, *, requests: int, deliveries: int) -> Show:
    """Choose by what the console is."""
    kind = _Table if console.is_terminal else _Lines
    return kind(console, requests=requests, deliveries=deliveries)


def judged(count: int) -> str:
    """Mark a count that should be 0."""
    return f"[red]{count:,}[/]" if count else "[green]0[/]"


class _Table:
    def __init__(self, console: Console, *, requests: int, deliveries: int) -> None:
        self._deliveries = deliveries
        self._begin = time.monotonic()
        self._progress = Progress(
            TextColumn(" requests accepted"), BarColumn(), MofNCompleteColumn()
        )
        self._accepted = self._progress.add_task("", total=requests)
        # The report takes its place.
        self._live = Live(self._progress, console=console, transient=True)

    def __enter__(self) -> Show:
        self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        self._live.console.print(text, style="dim", highlight=False)

    def update(self, *, accepted: int, plain: Ledger, idempotent: Ledger) -> None:
        self._progress.update(self._accepted, completed=accepted)
        since = time.monotonic() - self._begin
        title = f"After {since:.0f} s, of {self._deliveries} deliveries"
        table = Table("", title=title, title_justify="left", box=box.SIMPLE_HEAD)
        for name in ("celery.Task", "IdempotentTask"):
            table.add_column(name, justify="right")
        both = plain, idempotent
        table.add_row("runs started", *(f"{each.runs:,}" for each in both))
        table.add_row("effects (ledger rows)", *(f"[bold]{each.rows:,}[/]" for each in both))
        table.add_row("  too many", *(judged(each.duplicates) for each in both))
        table.add_row(
            "  not there yet", *(f"{self._deliveries - each.distinct:,}" for each in both)
        )
        self._live.update(Group(table, self._progress))


class _Lines:
    def __init__(self, console: Console, *, requests: int, deliveries: int) -> None:
        self._console = console
        self._of = requests, deliveries
        self._begin = time.monotonic()
        self._last = self._begin

    def __enter__(self) -> Show:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def say(self, text: str) -> None:
        since = time.monotonic() - self._begin
        self._console.print(f"{since:5.1f} s  {text}", highlight=False, soft_wrap=True)

    def update(self, *, accepted: int, plain: Ledger, idempotent: Ledger) -> None:
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            requests, deliveries = self._of
            self.say(
                f"{accepted} of {requests} requests accepted. Entered of {deliveries} deliveries:"
                f" celery.Task {_told(plain)}, IdempotentTask {_told(idempotent)}"
            )


def _told(ledger: Ledger) -> str:
    return f"{ledger.distinct} ({ledger.duplicates} rows too many)"
