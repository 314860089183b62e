"""What a check says, and about which tasks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from celery_idempotent.celery.definition import Definition

__all__ = ["Finding", "Tasks", "named"]

#: By its name each task that is not left alone, and what its options make of it.
Tasks = Mapping[str, tuple[Any, Definition]]

#: So many names a finding lists.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that can go wrong. ``id`` begins with E where tasks will not run, with W where they will."""

    id: str
    problem: str
    hint: str

    @property
    def level(self) -> Literal["error", "warning"]:
        """How bad it is."""
        return "error" if self.id.startswith("E") else "warning"


def named(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
