"""Effects counted from outside the code under test: a file to which tasks append and which tests read."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

#: The environment variable by which a worker learns where its ledger is.
LEDGER_VARIABLE = "CELERY_IDEMPOTENT_TEST_LEDGER"


T = TypeVar("T")


class Lines(Generic[T]):
    """The lines of JSON in a file that only grows, each read and parsed once: tests ask often, and it grows long."""

    def __init__(self, path: Path, parse: Callable[[Any], T]) -> None:
        self._file = Growing(path)
        self._parse = parse
        self._lock = threading.Lock()
        self._known: list[T] = []

    def read(self) -> list[T]:
        """Return all that are whole, in the order of their writing."""
        with self._lock:
            self._known += [self._parse(json.loads(line)) for line in self._file.more()]
            return list(self._known)


class Growing:
    """A file that only grows, and to which processes append by lines."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0

    def more(self) -> list[bytes]:
        """Return the whole lines that have come since the last time."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            lines = file.read()
        lines = lines[: lines.rfind(b"\n") + 1]
        self._offset += len(lines)
        return lines.splitlines()

    def append(self, line: str) -> None:
        """Append by one O_APPEND write: a line is whole, or it is not there."""
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(fd, line.encode() + b"\n")
        finally:
            os.close(fd)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line: who did what to which key, and when. ``time`` is the wall clock's, in seconds."""

    phase: str
    key: str
    task_id: str
    pid: int
    time: float


class Ledger:
    """A file with one line for each effect."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._lines = Lines(self.path, lambda line: Entry(**line))

    @classmethod
    def from_env(cls) -> Ledger:
        """Return the ledger that the test handed to this worker."""
        return cls(os.environ[LEDGER_VARIABLE])

    def append(self, phase: str, key: object = "", task_id: str | None = "") -> None:
        """Note an effect of the calling process."""
        entry = Entry(
            phase=phase, key=str(key), task_id=task_id or "", pid=os.getpid(), time=time.time()
        )
        Growing(self.path).append(json.dumps(asdict(entry)))

    def entries(
        self, phase: str | None = None, key: object | None = None, task_id: str | None = None
    ) -> list[Entry]:
        """Return the entries in the order of their writing, all or those that match."""
        return [
            entry
            for entry in self._lines.read()
            if (phase is None or entry.phase == phase)
            and (key is None or entry.key == str(key))
            and (task_id is None or entry.task_id == task_id)
        ]

    def count(
        self, phase: str | None = None, key: object | None = None, task_id: str | None = None
    ) -> int:
        """Return how many entries match."""
        return len(self.entries(phase, key, task_id))
