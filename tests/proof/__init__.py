"""The proof that anyone can rerun: ``python -m tests.proof`` explores, replays and breaks, and prints one table.

A part is a module of this folder, named in ``PARTS``, with ``run(options) -> list[Row]``. A part that is tried alone
is named: ``python -m tests.proof model traces``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

#: In the order of the table. The shortest come first: what is broken shows early.
PARTS: tuple[str, ...] = (
    *("model", "planted", "traces", "races", "delivery"),
    *("chaos", "recovery", "soak"),
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is asked for: all (``--full``: an hour, else minutes), and the ``seed`` of what is chosen by chance."""

    full: bool = False
    seed: int = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table: ``what`` was done, ``how_many`` times, what was ``found``, and the command that repeats it.

    ``held``: is that what is promised? One row that is not makes the command end with 1.
    """

    name: str
    what: str
    how_many: str
    found: str
    command: str
    held: bool


def say(line: str) -> None:
    """Tell how far it is."""
    sys.stderr.write(f"{line}\n")


def show(table: Sequence[Sequence[object]]) -> None:
    """Print a table, the first row its head, in the form of the docs."""
    rows = [[str(cell) for cell in row] for row in table]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    for cells in rows:
        padded = (cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
        sys.stdout.write(f"| {' | '.join(padded)} |\n")
