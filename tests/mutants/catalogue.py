"""The mutants, as the files of this directory have them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

#: Ten times as fast as the one in Python, where libyaml is.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


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


def mutants() -> list[Mutant]:
    """Return all mutants; a group is a file."""
    return [
        Mutant(**{**each, "group": path.stem, "file": file, "killers": tuple(each["killers"])})
        for path in sorted(Path(__file__).parent.glob("*.yaml"))
        for file, bugs in yaml.load(path.read_text(), Loader=_Loader).items()
        for each in bugs
    ]
