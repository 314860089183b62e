"""What a check returns, and the tasks that it looks at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from celery_idempotent.celery.definition import Definition

if TYPE_CHECKING:
    from celery import Task

#: The idempotent tasks by name, each with the definition that its options make.
Tasks = Mapping[str, "tuple[Task[..., object], Definition]"]

#: How many names a finding lists.
_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """Something that can go wrong. ``id`` begins with E where tasks will not run, with W where they will."""

    id: str
    problem: str
    hint: str

    @property
    def level(self) -> Literal["error", "warning"]:
        """Whether tasks will not run, or will."""
        return "error" if self.id.startswith("E") else "warning"


def named(names: Iterable[str]) -> str:
    """Return the first names, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return ", ".join(found[:_NAMED]) + more
