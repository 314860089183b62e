"""The mutants, as the files of this directory have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

__all__ = ["Mutant", "mutants"]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A bug to be noticed: in ``file`` of the package, ``old``, which is there once, becomes ``new``."""

    group: str
    id: str
    file: str
    old: str
    new: str
    bug: str
    killers: tuple[str, ...]

    def applied(self, text: str) -> str:
        """Return the text of the file with the bug in it."""
        assert text.count(self.old) == 1, f"{self.id}: {text.count(self.old)} times in {self.file}"
        return text.replace(self.old, self.new)


def mutants() -> list[Mutant]:
    """Return all mutants; a group is a file."""
    return [
        Mutant(**{**each, "group": path.stem, "killers": tuple(each["killers"])})
        for path in sorted(Path(__file__).parent.glob("*.yaml"))
        for each in yaml.safe_load(path.read_text())
    ]
