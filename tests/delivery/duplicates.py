"""What a duplicate shows: the tables of ``duplicates.md``, by heading, as the tests compare them with what happened."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_PAGE = Path(__file__).with_name("duplicates.md").read_text()


@dataclass(frozen=True)
class Row:
    """One row: the words in backticks of each cell, by the heading of its column, and each cell as it is."""

    words: dict[str, list[str]]
    text: dict[str, str]

    def fits(self, policy: str, acks: str) -> bool:
        return policy in self.words["policy"] and acks in self.words.get("acks", [acks])


def rows(heading: str) -> list[Row]:
    """Return the table under a heading."""
    section = _PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    columns, _, *cells = lines
    return [
        Row(
            words={
                name: re.findall(r"`([^`]+)`", cell)
                for name, cell in zip(columns, each, strict=True)
            },
            text=dict(zip(columns, each, strict=True)),
        )
        for each in cells
    ]


def row(heading: str, policy: str, acks: str) -> Row:
    """Return the row for a task with this policy and these acks."""
    (found,) = [each for each in rows(heading) if each.fits(policy, acks)]
    return found
