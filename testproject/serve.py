"""The whole project in one command: ``make serve``, or ``python -m testproject.serve``.

A server for messages, a database, a worker, beat and the web server, all in a directory that goes with them. The
records are in the database, so that a payment and its record are committed together. Ends, with all it started, on
SIGTERM, SIGHUP and Ctrl-C; should it be killed itself, its processes end by themselves (:mod:`testproject.demo.leash`).
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
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from testproject.demo.processes import Child, DemoError
from testproject.embedded import ServerUnavailable, open_redis

__all__ = ["main"]

_START_S = 60.0
_GRACE_S = 8.0


class _Stopped(BaseException):
    """The server was asked to end."""


def main() -> int:
    """Serve until stopped; 0 if that was asked for, 1 if a process ended by itself, 2 if there was no start."""
    port = os.environ.get("PORT", "8000")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        return _fail(f"PORT is a number from 1 to 65535, not {port!r}.")
    try:
        with _stoppable(), contextlib.ExitStack() as stack:
            _serve(int(port), stack)
    except _Stopped:
        print("Stopped.", flush=True)
        return 0
    except (DemoError, ServerUnavailable) as trouble:
        return _fail(str(trouble))
    return 0


def _serve(port: int, stack: contextlib.ExitStack) -> None:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError as taken:
        raise DemoError(
            f"port {port} cannot be had ({taken.strerror}): make serve PORT=8001"
        ) from None
    directory = Path(tempfile.mkdtemp(prefix="celery-idempotent-serve-"))
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    redis = stack.enter_context(open_redis())
    env = {
        "DATABASE_PATH": str(directory / "db.sqlite3"),
        "BANK_MOOD_FILE": str(directory / "bank_mood"),
        "DJANGO_DEBUG": "0",
        "DJANGO_SECRET_KEY": secrets.token_hex(32),
        "DJANGO_SETTINGS_MODULE": "testproject.settings",
        "REDIS_URL": redis.url(db=0),
        "IDEMPOTENCY_STORE": os.environ.get("IDEMPOTENCY_STORE", "django://"),
    }
    _prepare(directory, env)
    celery = ("-A", "testproject")
    children = [
        Child("web", "testproject.web", str(port), directory=directory, env=env),
        Child(
            "worker",
            "celery",
            *(*celery, "worker", "--concurrency", "2", "--loglevel", "INFO"),
            *("--without-gossip", "--without-mingle"),
            directory=directory,
            env=env,
        ),
        Child(
            "beat",
            "celery",
            *(*celery, "beat", "--schedule", str(directory / "beat"), "--pidfile=", "-l", "INFO"),
            directory=directory,
            env=env,
        ),
    ]
    stack.callback(_stop, children)
    for child in children:
        child.start()
    _wait(port, children)
    _tell(port, directory)
    while True:
        for child in children:
            _check(child)
        time.sleep(0.5)


def _prepare(directory: Path, env: dict[str, str]) -> None:
    setup = Child("setup", "testproject", "demo_users", directory=directory, env=env)
    done = subprocess.run(
        setup.command, cwd=directory, env=setup.env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise DemoError(f"the database cannot be set up:\n{done.stderr.strip()}")


def _wait(port: int, children: list[Child]) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        for child in children:
            _check(child)
        with contextlib.suppress(OSError, urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=5).close()
            return
        time.sleep(0.1)
    raise DemoError("the web server did not start")


def _check(child: Child) -> None:
    try:
        child.check()
    except DemoError as trouble:
        raise DemoError(f"{trouble}:\n{child.tail()}") from None


def _stop(children: list[Child]) -> None:
    for child in children:
        child.terminate()
    with contextlib.ExitStack() as each:
        for child in children:
            each.callback(child.stop, grace_s=_GRACE_S)


def _tell(port: int, directory: Path) -> None:
    base = f"http://127.0.0.1:{port}"
    print(
        f"""
  {base}/pay/           a payment: press the button twice, open a second tab
  {base}/               the webhook ledger, empty until a webhook comes in
  {base}/payments/      the API (POST {{"amount": 100, "currency": "EUR", "recipient": "acct_1"}})
  {base}/payments/now/  the same, done in the request
  {base}/admin/         the admin

  Log in as alice (password alice), bob (bob) or admin (admin). With curl:

  curl -u alice:alice -H 'Idempotency-Key: "order-17"' -H 'Content-Type: application/json' \\
       -d '{{"amount": 100, "currency": "EUR", "recipient": "acct_1"}}' {base}/payments/

  Logs and data are in {directory} until this ends. Ctrl-C ends it.
""",
        flush=True,
    )


@contextlib.contextmanager
def _stoppable() -> Iterator[None]:
    def stop(_signum: int, _frame: FrameType | None) -> None:
        for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(each, signal.SIG_IGN)  # once is enough: what follows cleans up
        raise _Stopped

    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, stop)
    yield


def _fail(message: str) -> int:
    print(message, file=sys.stderr, flush=True)
    return 2


if __name__ == "__main__":
    sys.exit(main())
