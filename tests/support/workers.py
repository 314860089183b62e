"""Real Celery worker processes, to be watched, killed, frozen and stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

import celery_idempotent
from tests.support.paths import ROOT
from tests.support.preloaded import Process, spawn
from tests.support.waiting import wait_for

_READY = " ready."


def child_environment(extra: Mapping[str, object] | None = None) -> dict[str, str]:
    """Return the environment for a Python process that shall import what this one imports.

    The package under test comes first, wherever this process has it from; `tests` and `testproject` come after it, with
    the repository's root. The source tree therefore never stands in for the wheel. Django's settings are those in
    ``extra``, or none: an import of the test project sets those of the whole test process.
    """
    package = Path(celery_idempotent.__path__[0]).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(package), str(ROOT)])}
    environment.pop("DJANGO_SETTINGS_MODULE", None)
    environment |= {
        "PYTHONUNBUFFERED": "1",
        # Root on a test machine is nothing to warn about.
        "C_FORCE_ROOT": "1",
    }
    return environment | {name: str(value) for name, value in (extra or {}).items()}


class Worker:
    """A worker of the app in module ``app``, in a process group of its own.

    ``directory`` takes its log and is where it runs; ``env`` reaches the app module; ``arguments`` go to the command
    line. It is a fork of a process that has imported Celery's worker, or a ``fresh`` interpreter, for an app that
    patches Celery before the worker is imported.

    Starting returns when the worker says that it is ready.
    """

    def __init__(
        self,
        app: str,
        *,
        directory: Path,
        name: str = "worker",
        concurrency: int = 1,
        pool: str = "prefork",
        queues: Sequence[str] = (),
        env: Mapping[str, object] | None = None,
        arguments: Sequence[str] = (),
        fresh: bool = False,
    ) -> None:
        self.name = name
        self._fresh = fresh
        self.log_path = directory / f"{name}.log"
        self._directory = directory
        self._environment = child_environment(env)
        self._command = [
            *(sys.executable, "-m", "celery", "-A", app, "worker"),
            *(f"--pool={pool}", f"--concurrency={concurrency}", "--loglevel=INFO"),
            *("-n", f"{name}@%h", "--without-gossip", "--without-mingle", "--without-heartbeat"),
            *(("-Q", ",".join(queues)) if queues else ()),
            *arguments,
        ]
        self._process: Process | subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """The process id of the worker's main process, also after its end."""
        assert self._process is not None, f"{self.name} was not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the main process lives."""
        return self._process is not None and self._process.poll() is None

    @property
    def exit_code(self) -> int | None:
        """How the main process ended (negative: by that signal); ``None`` while it lives."""
        return self._process.poll() if self._process is not None else None

    @property
    def log(self) -> str:
        """Everything that the worker wrote, over all its starts."""
        return self.log_path.read_text(errors="replace") if self.log_path.exists() else ""

    def start(self, *, timeout: float = 90.0, ready: bool = True) -> Worker:
        """Start the worker (again) and, with ``ready``, wait until it is."""
        assert not self.running, f"{self.name} runs already"
        already = len(self.log)
        with self.log_path.open("ab") as log:
            self._process = spawn(
                self._command,
                cwd=self._directory,
                env=self._environment,
                log=log,
                fresh=self._fresh,
            )
        return self.wait_until_ready(timeout, already) if ready else self

    def wait_until_ready(self, timeout: float = 90.0, already: int = 0) -> Worker:
        """Wait until it says so, after the first ``already`` characters of its log."""
        wait_for(
            lambda: _READY in self.log[already:] or not self.running,
            timeout,
            lambda: f"{self.name} to be ready; its log:\n{self.tail()}",
        )
        assert self.running, f"{self.name} ended with {self.exit_code} at once:\n{self.tail()}"
        return self

    def tail(self, lines: int = 60) -> str:
        """Return the end of the log."""
        return "\n".join(self.log.splitlines()[-lines:])

    def children(self) -> list[int]:
        """Return the pids of the pool's processes, oldest first; the main process is not among them."""
        try:
            found = psutil.Process(self.pid).children()
            found.sort(key=lambda each: each.create_time())
        except psutil.NoSuchProcess:
            return []
        return [each.pid for each in found if alive(each.pid)]

    def kill(self) -> None:
        """End the main process and all its children with SIGKILL, as the loss of the machine would."""
        self._signal_group(signal.SIGKILL)
        if self._process is not None:
            self._process.wait(timeout=10)

    def kill_child(self, pid: int) -> None:
        """End one process of the pool with SIGKILL, as the kernel does when memory runs out."""
        assert pid in self.children(), f"{pid} is no child of {self.name}: {self.children()}"
        os.kill(pid, signal.SIGKILL)

    def freeze(self, pid: int | None = None) -> None:
        """Stop one process, or the worker with all its children, so that it neither works nor dies."""
        if pid is None:
            if self._process is not None:
                freeze_group(self._process.pid)
        else:
            freeze(pid)

    def thaw(self, pid: int | None = None) -> None:
        """End :meth:`freeze`."""
        if pid is None:
            self._signal_group(signal.SIGCONT)
        else:
            os.kill(pid, signal.SIGCONT)

    def stop(self, timeout: float = 60.0) -> None:
        """Shut down warmly: running tasks finish, for up to ``timeout`` seconds. Then kill what is left.

        A process of the pool may take 30 s to end: it waits for the main process to count its results, and that for its
        end (billiard). A worker that is killed meanwhile does not give its messages with an ETA back to Redis.
        """
        if self.running and self._process is not None:
            self.thaw()
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=timeout)
        self.kill()

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal to the main process, such as SIGTERM, SIGQUIT or SIGINT."""
        os.kill(self.pid, number)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for the main process to end by itself; return its exit code."""
        assert self._process is not None
        return self._process.wait(timeout=timeout)

    def _signal_group(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        # The children stay in the group after the main process has died, so ask for the group, not for the process.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)
        if number is signal.SIGKILL:
            until = time.monotonic() + 5
            while _group_lives(self._process.pid) and time.monotonic() < until:
                self._process.poll()
                time.sleep(0.01)


def alive(pid: int) -> bool:
    """Whether the process exists and is more than a zombie that nobody has waited for."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def freeze(pid: int) -> None:
    """Stop a process, and return once each of its threads stands still.

    A loaded machine runs other threads on until one of them has handled the signal.
    """
    os.kill(pid, signal.SIGSTOP)
    _wait_until_stopped(pid)


def freeze_group(group: int) -> None:
    """Stop every process of a group, as :func:`freeze` does."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGSTOP)
    for pid in _members(group):
        _wait_until_stopped(pid)


def _wait_until_stopped(pid: int) -> None:
    def stopped() -> bool:
        states = []
        for path in Path(f"/proc/{pid}/task").glob("*/stat"):
            with contextlib.suppress(OSError):  # the thread has ended
                states.append(path.read_text().rpartition(")")[2].split()[0])
        return all(state in "TtZX" for state in states)

    wait_for(stopped, 30, f"the threads of process {pid} to stop", interval=0.001)


def _members(group: int) -> list[int]:
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(pid) == group:
                found.append(pid)
    return found


def _group_lives(group: int) -> bool:
    return any(alive(pid) for pid in _members(group))


def in_child(function: Callable[[], str]) -> str:
    """Return what a function says in a fork of this process, whose signal handlers and threads are its own."""
    reading, writing = os.pipe()
    if not (pid := os.fork()):
        try:
            words = function()
        except BaseException as error:  # noqa: BLE001  the parent shall see it
            words = repr(error)
        os.write(writing, words.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(pid, 0)
    with os.fdopen(reading) as answer:
        return answer.read()
