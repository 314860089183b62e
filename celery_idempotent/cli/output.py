"""What commands write: tables for people, tabs for pipes, JSON lines for programs, progress on long work."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence

import click

#: So many characters of a cell are shown on a terminal.
_WIDEST = 40


def on_terminal() -> bool:
    """Does a person read the output, or a program?"""
    return sys.stdout.isatty()


def width() -> int:
    """Return how many characters a line of the terminal has."""
    return shutil.get_terminal_size((80, 24)).columns


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, least: int | None = None) -> None:
    """Write a table, into a pipe whole and with tabs.

    On a terminal cells are cut, empty columns are left out, and so are the last ones where it is too narrow, down to
    ``least`` columns.
    """
    if not on_terminal():
        for row in [head, *rows]:
            click.echo("\t".join(cell or "-" for cell in row))
        return
    columns = [
        [cell if len(cell) <= _WIDEST else f"{cell[: _WIDEST - 1]}…" for cell in (title, *cells)]
        for title, *cells in zip(head, *rows, strict=True)
        if any(cells)
    ]
    widths = [max(map(len, column)) for column in columns]
    while least and len(widths) > least and sum(widths) + 2 * len(widths) > width():
        widths.pop()
    for line in zip(*columns[: len(widths)], strict=True):
        cells = [cell.ljust(size) for cell, size in zip(line, widths, strict=True)]
        click.echo("  ".join(cells).rstrip())


def paragraph(text: str, *, indent: str = "", bold: bool = False) -> None:
    """Write a sentence or two, broken at the width of the terminal, in a pipe on one line."""
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
    """Write a message for people to standard error, where a pipe does not see it."""
    click.echo(text, err=True)


def write_json(item: Mapping[str, object]) -> None:
    """Write one object, on a line of its own."""
    click.echo(json.dumps(item, ensure_ascii=False))


class Progress:
    """Says how far long work has come: on a terminal, and after a second."""

    def __init__(self, what: str) -> None:
        self.count = 0
        self._what = what
        self._shown = time.monotonic()
        self._written = False

    def add(self, count: int = 1) -> None:
        """So many more are done."""
        self.count += count
        if sys.stderr.isatty() and time.monotonic() - self._shown > 1:
            self._shown, self._written = time.monotonic(), True
            click.echo(f"\r{self.count:,} {self._what}\x1b[K", nl=False, err=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._written:
            click.echo("\r\x1b[K", nl=False, err=True)
