"""The demo's processes: started by exec, each in a group of its own, none left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import testproject
from testproject.demo import leash

__all__ = ["Child", "DemoError", "has_unread", "is_asleep"]

_ROOT = Path(testproject.__file__).resolve().parent.parent
_GONE_S = 1.0


class DemoError(Exception):
    """The demo itself could not go on: nothing is said about the library."""


class Child:
    """A command, its log, and the leash that ends it when the demo is gone (see :mod:`.leash`)."""

    def __init__(
        self, name: str, module: str, *arguments: str, directory: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.command: Sequence[str] = (sys.executable, "-m", module, *arguments)
        self._directory = directory
        # Import this very tree, and write nothing into it: the working directory is the demo's.
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A process that is killed leaves its temporary files: they go with the directory.
        elsewhere = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(directory)}
        self.env = {**os.environ, **env, **elsewhere}
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-I", leash.__file__, *self.command),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self._directory,
                env=self.env,
                start_new_session=True,
            )

    def check(self) -> None:
        """Raise :exc:`DemoError` if it ended, which is for us to decide."""
        if self._process is not None and self._process.poll() is not None:
            code = self._process.returncode
            raise DemoError(f"{self.name} ended by itself, with exit code {code}")

    def kill(self) -> None:
        """SIGKILL, for the whole group, and wait until it is gone."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()
        deadline = time.monotonic() + _GONE_S
        # What the group's leader had started is init's to reap; PID 1 of a container may never do.
        while time.monotonic() < deadline:
            try:
                os.killpg(process.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.01)

    def terminate(self) -> None:
        """SIGTERM, for the command, and do not wait."""
        if self._process is not None:
            self._process.terminate()

    def stop(self, *, grace_s: float) -> None:
        """SIGTERM, then, for whatever is left after ``grace_s`` seconds, SIGKILL."""
        try:
            if self._process is not None:
                self._process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(grace_s)
        finally:
            self.kill()

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


def is_asleep(pid: int) -> bool:
    """Does a process wait for something to happen, as far as this system tells?"""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return not Path("/proc/self").exists()
    return stat.rpartition(")")[2].split()[0] == "S"


def has_unread(pid: int) -> bool:
    """Has a process data in a TCP socket that it did not read, as far as this system tells?"""
    process, sockets = Path(f"/proc/{pid}"), set()
    try:
        connections = (process / "net/tcp").read_text().splitlines()[1:]
        for file in (process / "fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                sockets.add(str(file.readlink()))
    except FileNotFoundError:
        return False
    for fields in map(str.split, connections):
        unread, inode = int(fields[4].partition(":")[2], 16), fields[9]
        if unread and f"socket:[{inode}]" in sockets:
            return True
    return False
