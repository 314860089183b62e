"""What is to be seen while the demo works: a progress bar on a terminal, else a line now and then."""

from __future__ import annotations

import time
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Show", "show_on"]

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

    def update(self, *, accepted: int, entered: int) -> None:
        """So many requests were accepted, so many deliveries are in the idempotent ledger."""


def show_on(console: Console, *, requests: int, deliveries: int) -> Show:
    """Choose by what the console is."""
    kind = _Bars if console.is_terminal else _Lines
    return kind(console, requests=requests, deliveries=deliveries)


class _Bars:
    def __init__(self, console: Console, *, requests: int, deliveries: int) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            expand=True,
        )
        self._accepted = self._progress.add_task("requests accepted", total=requests)
        self._entered = self._progress.add_task("deliveries in the ledger", total=deliveries)

    def __enter__(self) -> Show:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def say(self, text: str) -> None:
        self._progress.console.print(text, style="dim", highlight=False)

    def update(self, *, accepted: int, entered: int) -> None:
        self._progress.update(self._accepted, completed=accepted)
        self._progress.update(self._entered, completed=entered)


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

    def update(self, *, accepted: int, entered: int) -> None:
        now = time.monotonic()
        if now - self._last >= _LINE_EVERY_S:
            self._last = now
            requests, deliveries = self._of
            self.say(
                f"{accepted} of {requests} requests accepted, "
                f"{entered} of {deliveries} deliveries in the ledger"
            )
