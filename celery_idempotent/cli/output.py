"""What commands write: tables for people, tabs for pipes, JSON lines for programs, progress on long work."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import click

__all__ = ["Column", "Progress", "note", "paragraph", "table", "width", "write_json"]

#: Colours of states, on a terminal.
_COLOURS = {
    "QUEUED": "blue",
    "PROCESSING": "cyan",
    "PROCESSING, stale": "red",
    "INTERRUPTED": "yellow",
    "COMPLETED": "green",
    "FAILED": "red",
    "error": "red",
    "warning": "yellow",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: ``least`` is the width of the terminal from which on it is shown."""

    title: str
    least: int = 0
    right: bool = False


def width() -> int:
    """Return how many characters a line of the terminal has."""
    return shutil.get_terminal_size((80, 24)).columns


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Write a table: as wide as the terminal, or whole and with tabs into a pipe."""
    if not sys.stdout.isatty():
        for row in [[each.title for each in columns], *rows]:
            click.echo("\t".join(cell or "-" for cell in row))
        return
    shown = [n for n, each in enumerate(columns) if width() >= each.least]
    shown = [n for n in shown if any(row[n] for row in rows)] or shown
    _draw([columns[n] for n in shown], [[row[n] for n in shown] for row in rows])


def _draw(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    try:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text
    except ImportError:
        _draw_plainly(columns, rows)
        return
    drawn = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for each in columns:
        drawn.add_column(
            each.title, justify="right" if each.right else "left", no_wrap=True, overflow="ellipsis"
        )
    for row in rows:
        drawn.add_row(*(Text(cell, style=_COLOURS.get(cell, "")) for cell in row))
    Console(width=width(), highlight=False).print(drawn)


def _draw_plainly(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Give each column what it needs; the widest ones give way."""
    lines = [[each.title for each in columns], *rows]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    while sum(widths) + 2 * (len(widths) - 1) > width() and max(widths) > 8:
        widths[widths.index(max(widths))] -= 1
    for line in lines:
        cells = [
            _fit(cell, size, right=each.right)
            for each, cell, size in zip(columns, line, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _fit(text: str, size: int, *, right: bool) -> str:
    cut = text if len(text) <= size else f"{text[: size - 1]}…"
    return cut.rjust(size) if right else cut.ljust(size)


def paragraph(text: str, *, indent: str = "", bold: bool = False) -> None:
    """Write a sentence or two, broken at the width of the terminal (80 in a pipe)."""
    lines = textwrap.wrap(
        text,
        min(width(), 120) if sys.stdout.isatty() else 10_000,
        initial_indent=indent,
        subsequent_indent=" " * len(indent),
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        click.secho(line, bold=bold)


def note(text: str) -> None:
    """Write what is not the answer, for people, where a pipe does not see it."""
    click.echo(text, err=True)


def write_json(item: Mapping[str, Any]) -> None:
    """Write one object, on a line of its own."""
    click.echo(json.dumps(item, ensure_ascii=False))


class Progress:
    """A line that says how far long work has come, with its rate: on a terminal, and after a second."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self.count = 0
        self._what = what
        self._total = total
        self._began = self._shown = time.monotonic()

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        self.count += count
        now = time.monotonic()
        if sys.stderr.isatty() and now - self._began > 1 and now - self._shown > 0.2:
            self._shown = now
            of = "" if self._total is None else f" of {self._total:,}"
            rate = self.count / (now - self._began)
            click.echo(
                f"\r{self.count:,}{of} {self._what}, {rate:,.0f}/s\x1b[K", nl=False, err=True
            )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown != self._began:
            click.echo("\r\x1b[K", nl=False, err=True)
