"""The whole project in one command: ``make serve``, or ``python -m testproject.serve``.

A server for messages, a database, a worker, beat and the web server, all in a directory that goes with them. The
records are in the database, so that a payment and its record are committed together. Ends, with all it started, on
SIGTERM, SIGHUP and Ctrl-C; should it be killed itself, its processes end by themselves. The demo uses the parts.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType

import testproject
from testproject.embedded import EmbeddedRedis, Launched, ServerUnavailable

_GRACE_S = 8.0
_START_S = 60.0
_ROOT = Path(testproject.__file__).resolve().parent.parent
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessError(Exception):
    """A process ended, or was not there in time."""


class Stopped(BaseException):
    """This process was asked to end by the signal of this number."""


class Child:
    """A Python module that runs as a process, with a log."""

    def __init__(self, directory: Path, name: str, command: str) -> None:
        self.directory, self.name = directory, name
        self.log = directory / f"{name}.log"
        self.command = (sys.executable, "-m", *command.split())
        # Import this very tree, and write nothing into it: the working directory is the stage's.
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A process that is killed leaves its temporary files: they go with the directory.
        elsewhere = {"PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(directory)}
        self.env = {**os.environ, **elsewhere}
        self.launched: Launched | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.launched = Launched(self.command, directory=self.directory, log=log, env=self.env)

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


@contextlib.contextmanager
def open_stage(
    name: str, settings: str, *, processes: int, store: str, port: int = 0
) -> Iterator[Sequence[Child]]:
    """Give the processes of the project, to be started: beat, the web server, the worker.

    They work in a directory of their own. In the end all are stopped, and it is removed unless there is a file ``keep``
    in it. ``{}`` in ``store`` is the Redis.
    """
    directory = Path(tempfile.mkdtemp(prefix=f"celery-idempotent-{name}-"))
    try:
        with contextlib.ExitStack() as stack:
            redis_url = stack.enter_context(EmbeddedRedis()).url()
            os.environ.update(
                BANK_MOOD_FILE=str(directory / "bank_mood"),
                DATABASE_PATH=str(directory / "db.sqlite3"),
                DJANGO_DEBUG="0",
                DJANGO_SECRET_KEY=secrets.token_hex(32),
                DJANGO_SETTINGS_MODULE=settings,
                REDIS_URL=redis_url,
                IDEMPOTENCY_STORE=store.format(redis_url),
            )
            celery = "celery -A testproject"
            worker = f"{celery} worker --concurrency {processes} --queues celery,housekeeping"
            children = [
                Child(
                    directory, "beat", f"{celery} beat --pidfile= --loglevel INFO --schedule beat"
                ),
                Child(directory, "web", f"testproject.web {port} port"),
                Child(
                    directory,
                    "worker",
                    f"{worker} --without-gossip --without-mingle --loglevel INFO",
                ),
            ]
            stack.callback(_stop_all, children)
            yield children
    finally:
        if not (directory / "keep").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _stop_all(children: Sequence[Child]) -> None:
    running = [child.launched for child in children if child.launched is not None]
    for launched in running:
        launched.tell_to_stop()
    with contextlib.ExitStack() as each:
        for launched in running:
            each.callback(launched.stop, _GRACE_S)


def start_all(children: Sequence[Child]) -> int:
    """Start them, wait until requests are accepted, and return the port of the web server."""
    for child in children:
        child.start()
    port_file = children[0].directory / "port"
    deadline = time.monotonic() + _START_S
    while not port_file.exists():
        check_all(children)
        if time.monotonic() > deadline:
            raise ProcessError("the web server did not start")
        time.sleep(0.02)
    return int(port_file.read_text())


def check_all(children: Sequence[Child]) -> None:
    """Raise :exc:`ProcessError`, with the end of the log, if one ended by itself."""
    for child in children:
        if child.launched is not None and (code := child.launched.exit_code()) is not None:
            raise ProcessError(f"{child.name} ended, with exit code {code}:\n{child.tail()}")


def be_stoppable() -> None:
    """Turn the first signal into :exc:`Stopped`, from now on: everything is stopped on the way out."""

    def stop(signum: int, _: FrameType | None) -> None:
        for each in _SIGNALS:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(signum)

    for each in _SIGNALS:
        signal.signal(each, stop)


def main() -> int:
    """Serve until stopped; 0 if that was asked for, 2 if a process ended by itself or could not start."""
    port, framework = os.environ.get("PORT", "8000"), os.environ.get("APP", "django")
    try:
        if framework not in ("django", "fastapi"):
            raise ProcessError(f"APP is django or fastapi, not {framework!r}.")
        if not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ProcessError(f"PORT is a number from 1 to 65535, not {port!r}.")
        be_stoppable()
        with contextlib.ExitStack() as stack:
            _serve(int(port), stack)
    except Stopped:
        print("Stopped.", flush=True)
    except (ProcessError, ServerUnavailable) as trouble:
        print(trouble, file=sys.stderr, flush=True)
        return 2
    return 0


def _serve(port: int, stack: contextlib.ExitStack) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as taken:
        raise ProcessError(
            f"port {port} cannot be had ({taken.strerror}): make serve PORT=8001"
        ) from None
    store = os.environ.get("IDEMPOTENCY_STORE", "django://")
    stage = open_stage("serve", "testproject.settings", processes=2, store=store, port=port)
    children = stack.enter_context(stage)
    directory = children[0].directory
    setup = Child(directory, "setup", "testproject demo_users --records")
    done = subprocess.run(
        setup.command, cwd=directory, env=setup.env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ProcessError(f"the database cannot be set up:\n{done.stderr.strip()}")
    start_all(children)
    print(_WELCOME.format(base=f"http://127.0.0.1:{port}", directory=directory), flush=True)
    while True:
        check_all(children)
        time.sleep(0.5)


_WELCOME = """
  {base}/pay/           a payment: press the button twice, open a second tab
  {base}/               the webhook ledger, empty until a webhook comes in
  {base}/payments/      the API (POST {{"amount": 100, "currency": "EUR", "recipient": "acct_1"}})
  {base}/payments/now/  the same, done in the request
  {base}/admin/         the admin, with a record in each state

  Log in as alice (password alice), bob (bob) or admin (admin). With curl:

  curl -u alice:alice -H 'Idempotency-Key: "order-17"' -H 'Content-Type: application/json' \\
       -d '{{"amount": 100, "currency": "EUR", "recipient": "acct_1"}}' {base}/payments/

  Logs and data are in {directory} until this ends. Ctrl-C ends it.
"""

if __name__ == "__main__":
    sys.exit(main())
