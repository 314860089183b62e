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

import click

#: Colours of states, on a terminal.
_COLOURS = {
    "QUEUED": "blue",
    "PROCESSING": "cyan",
    "PROCESSING, stale": "red",
    "INTERRUPTED": "yellow",
    "COMPLETED": "green",
    "FAILED": "red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    ``from_width`` is the width of the terminal from which on it is shown; to ``least`` characters it may be cut where
    that is too narrow, and without that never.
    """

    title: str
    from_width: int = 0
    least: int | None = None
    right: bool = False


def on_terminal() -> bool:
    """Does a person read what is written, or a program?"""
    return sys.stdout.isatty()


def width() -> int:
    """Return how many characters a line of the terminal has."""
    return shutil.get_terminal_size((80, 24)).columns


def table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Write a table: as wide as the terminal, or whole and with tabs into a pipe."""
    if not on_terminal():
        for row in [[each.title for each in columns], *rows]:
            click.echo("\t".join(cell or "-" for cell in row))
        return
    shown = [
        n
        for n, each in enumerate(columns)
        if width() >= each.from_width and (not rows or any(row[n] for row in rows))
    ]
    columns, rows = [columns[n] for n in shown], [[row[n] for n in shown] for row in rows]
    widths = _widths(columns, rows)
    for line in [[each.title for each in columns], *rows]:
        cells = [
            _fit(cell, size, right=each.right)
            for each, cell, size in zip(columns, line, widths, strict=True)
        ]
        click.echo("  ".join(cells).rstrip())


def _widths(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> list[int]:
    """Give each column what it needs; where that is too much, the widest of those that may be cut give way."""
    widths = [
        max(len(each.title), *(len(row[n]) for row in rows)) if rows else len(each.title)
        for n, each in enumerate(columns)
    ]
    while sum(widths) + 2 * (len(widths) - 1) > width():
        wide = [
            n
            for n, each in enumerate(columns)
            if each.least is not None and widths[n] > max(each.least, len(each.title))
        ]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def _fit(text: str, size: int, *, right: bool) -> str:
    cut = text if len(text) <= size else f"{text[: size - 1]}…"
    placed = cut.rjust(size) if right else cut.ljust(size)
    return click.style(placed, fg=_COLOURS[text]) if text in _COLOURS else placed


def paragraph(text: str, *, indent: str = "", bold: bool = False) -> None:
    """Write a sentence or two, broken at the width of the terminal (80 in a pipe)."""
    lines = textwrap.wrap(
        text,
        min(width(), 120) if on_terminal() else 10_000,
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


def write_json(item: Mapping[str, object]) -> None:
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
