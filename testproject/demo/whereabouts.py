"""Where each pool process is in its task: it leaves a note at every step, in a file of its own.

The notes are in the order of the program, so a process that was stopped (SIGSTOP) and whose last note is "working" has
not begun to write, and one whose last note is "settled" has nothing left that could be lost::

                begun ── claimed ── working ── writing ── written ── settled ── idle
    plain         x                    x          x          x*                    x     * and committed
    idempotent    x         x          x          x          x          x          x
                                                  └─ from here ──┘ to there, a run has written, and its key is not
                                                                   settled: in a database both are one transaction
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Step", "Where", "clear", "find", "note"]

_FOLDER = "whereabouts"


class Step(enum.Enum):
    """The last thing that a process noted."""

    IDLE = "idle"
    BEGUN = "begun"
    CLAIMED = "claimed"
    WORKING = "working"
    WRITING = "writing"
    WRITTEN = "written"
    SETTLED = "settled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Where:
    """One process, its task (the kind of its ledger; empty for others) and how far it is."""

    pid: int
    #: The worker's main process.
    parent: int
    step: Step
    kind: str = ""
    delivery_id: str = ""

    @property
    def at_work(self) -> bool:
        """Is it in one of the two tasks?"""
        return bool(self.kind) and self.step is not Step.IDLE


def note(directory: Path, where: Where) -> None:
    """Replace the note of this process."""
    folder = directory / _FOLDER
    line = [where.parent, where.step.value, where.kind, where.delivery_id]
    draft = folder / f"{where.pid}.draft"
    try:
        draft.write_text(json.dumps(line))
    except FileNotFoundError:
        folder.mkdir(exist_ok=True)
        draft.write_text(json.dumps(line))
    draft.replace(folder / str(where.pid))


def find(directory: Path) -> list[Where]:
    """Read the notes of all processes that are there."""
    found = []
    for path in (directory / _FOLDER).glob("*"):
        if path.name.isdecimal() and _alive(pid := int(path.name)):
            parent, step, kind, delivery = json.loads(path.read_text())
            where = Where(pid=pid, parent=parent, step=Step(step), kind=kind, delivery_id=delivery)
            found.append(where)
    return found


def clear(directory: Path) -> None:
    """Forget what the processes of an earlier worker noted."""
    for path in (directory / _FOLDER).glob("*"):
        with contextlib.suppress(FileNotFoundError):
            path.unlink()


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
