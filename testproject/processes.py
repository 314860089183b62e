"""The processes of ``make serve`` and of the demo: a web server, a worker and beat, none of them left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType

import testproject
from testproject.embedded import Launched

__all__ = [
    "Child",
    "ProcessError",
    "Stopped",
    "make_receiver",
    "stop_all",
    "stoppable",
    "wait_for_web",
]

_ROOT = Path(testproject.__file__).resolve().parent.parent
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessError(Exception):
    """A process ended, or was not there in time."""


class Stopped(BaseException):
    """This process was asked to end by a signal."""

    def __init__(self, signum: int) -> None:
        super().__init__(signum)
        self.signum = signum


class Child:
    """A Python module that runs as a process, with a log."""

    def __init__(
        self, name: str, module: str, *arguments: str, directory: Path, env: Mapping[str, str]
    ) -> None:
        self.name = name
        self.log = directory / f"{name}.log"
        self.command: Sequence[str] = (sys.executable, "-m", module, *arguments)
        self.directory = directory
        # Import this very tree, and write nothing into it: the working directory is the demo's.
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A process that is killed leaves its temporary files: they go with the directory.
        elsewhere = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(directory)}
        self.env = {**os.environ, **env, **elsewhere}
        self.launched: Launched | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.launched = Launched(self.command, directory=self.directory, log=log, env=self.env)

    def check(self) -> None:
        """Raise :exc:`ProcessError`, with the end of the log, if it ended by itself."""
        if self.launched is not None and (code := self.launched.exit_code()) is not None:
            raise ProcessError(f"{self.name} ended, with exit code {code}:\n{self.tail()}")

    def kill(self) -> None:
        """SIGKILL, for all its processes, and wait until they are gone."""
        launched, self.launched = self.launched, None
        if launched is not None:
            launched.kill()

    def tail(self, lines: int = 25) -> str:
        """The end of its log."""
        with contextlib.suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])
        return ""


def make_receiver(
    directory: Path, env: Mapping[str, str], *, processes: int, port: int = 0
) -> tuple[Child, Child, Child]:
    """Return beat, the web server and the worker, to be started. The web server's port is in the file ``port``."""
    celery = ("celery", "-A", "testproject")
    worker = ("worker", "--concurrency", str(processes), "--loglevel", "INFO")
    queues = ("--queues", "celery,housekeeping", "--without-gossip", "--without-mingle")
    beat = ("beat", "--schedule", str(directory / "beat"), "--pidfile=", "--loglevel", "INFO")
    web = ("testproject.web", str(port), str(directory / "port"))
    return (
        Child("beat", *celery, *beat, directory=directory, env=env),
        Child("web", *web, directory=directory, env=env),
        Child("worker", *celery, *worker, *queues, directory=directory, env=env),
    )


def wait_for_web(children: Sequence[Child], seconds: float = 60.0) -> int:
    """Return the port of the web server, once it accepts requests."""
    port_file = children[0].directory / "port"
    deadline = time.monotonic() + seconds
    while not port_file.exists():
        for child in children:
            child.check()
        if time.monotonic() > deadline:
            raise ProcessError("the web server did not start")
        time.sleep(0.02)
    return int(port_file.read_text())


def stop_all(children: Sequence[Child], grace_s: float) -> None:
    """Ask all to end, and kill what is left after ``grace_s`` seconds."""
    running = [child.launched for child in children if child.launched is not None]
    for launched in running:
        launched.tell_to_stop()
    with contextlib.ExitStack() as each:
        for launched in running:
            each.callback(launched.stop, grace_s)


@contextlib.contextmanager
def stoppable() -> Iterator[None]:
    """Turn the first signal into :exc:`Stopped`, so that everything is stopped on the way out."""

    def stop(signum: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    before = {each: signal.signal(each, stop) for each in _SIGNALS}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
