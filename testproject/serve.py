"""The whole project in one command: ``make serve``, or ``python -m testproject.serve``.

A server for messages, a database, a worker, beat and the web server, all in a directory that goes with them. The
records are in the database, so that a payment and its record are committed together. Ends, with all it started, on
SIGTERM, SIGHUP and Ctrl-C; should it be killed itself, its processes end by themselves.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from testproject.embedded import EmbeddedRedis, ServerUnavailable
from testproject.processes import (
    Child,
    ProcessError,
    Stopped,
    make_receiver,
    stop_all,
    stoppable,
    wait_for_web,
)

__all__ = ["main"]

_GRACE_S = 8.0


def main() -> int:
    """Serve until stopped; 0 if that was asked for, 2 if a process ended by itself or could not start."""
    port = os.environ.get("PORT", "8000")
    try:
        if not port.isdecimal() or not 0 < int(port) < 65_536:
            raise ProcessError(f"PORT is a number from 1 to 65535, not {port!r}.")
        with stoppable(), contextlib.ExitStack() as stack:
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
    directory = Path(tempfile.mkdtemp(prefix="celery-idempotent-serve-"))
    stack.callback(shutil.rmtree, directory, ignore_errors=True)
    redis = stack.enter_context(EmbeddedRedis())
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
    children = make_receiver(directory, env, processes=2, port=port)
    stack.callback(stop_all, children, _GRACE_S)
    for child in children:
        child.start()
    wait_for_web(children)
    print(_WELCOME.format(base=f"http://127.0.0.1:{port}", directory=directory), flush=True)
    while True:
        for child in children:
            child.check()
        time.sleep(0.5)


def _prepare(directory: Path, env: dict[str, str]) -> None:
    setup = Child("setup", "testproject", "demo_users", directory=directory, env=env)
    done = subprocess.run(
        setup.command, cwd=directory, env=setup.env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ProcessError(f"the database cannot be set up:\n{done.stderr.strip()}")


_WELCOME = """
  {base}/pay/           a payment: press the button twice, open a second tab
  {base}/               the webhook ledger, empty until a webhook comes in
  {base}/payments/      the API (POST {{"amount": 100, "currency": "EUR", "recipient": "acct_1"}})
  {base}/payments/now/  the same, done in the request
  {base}/admin/         the admin

  Log in as alice (password alice), bob (bob) or admin (admin). With curl:

  curl -u alice:alice -H 'Idempotency-Key: "order-17"' -H 'Content-Type: application/json' \\
       -d '{{"amount": 100, "currency": "EUR", "recipient": "acct_1"}}' {base}/payments/

  Logs and data are in {directory} until this ends. Ctrl-C ends it.
"""

if __name__ == "__main__":
    sys.exit(main())
