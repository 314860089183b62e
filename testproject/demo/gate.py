"""The gate in front of the ledger: while it is closed, no run writes, and none has just written.

A run that is killed after its write and before its key is settled will run again and write again:
from Redis, that gap cannot be closed (README, "what it promises"). So the demo kills before the
write, and makes sure of it with a file lock, shared by the runs::

    run         start row -- work -- [ shared lock -- write -- settle -- task_postrun ] -- unlock
    controller                 exclusive lock: nobody is between the brackets, some are before them
                               look who is (a start row without an entry), SIGKILL, unlock

The kernel releases the lock of whoever is killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Gate"]


class Gate:
    """One process's side of the lock; a pool process runs one task at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None

    def enter(self) -> None:
        """Wait until the gate is open, and keep it from being closed."""
        self.leave()
        self._fd = self._locked(fcntl.LOCK_SH)

    def leave(self) -> None:
        """Let the gate be closed again."""
        fd, self._fd = self._fd, None
        if fd is not None:
            os.close(fd)

    @contextlib.contextmanager
    def closed(self) -> Iterator[None]:
        """Close the gate, once everyone who went through has settled, and open it in the end."""
        fd = self._locked(fcntl.LOCK_EX)
        try:
            yield
        finally:
            os.close(fd)

    def _locked(self, how: int) -> int:
        fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, how)
        except BaseException:
            os.close(fd)
            raise
        return fd
