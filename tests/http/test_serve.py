"""`make serve`: the whole project in one command, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.http.sites import ORDER, Web, new_key
from tests.support.waiting import wait_for
from tests.support.workers import alive, child_environment


@contextlib.contextmanager
def serving(directory: Path, port: str, app: str = "django") -> Iterator[Any]:
    """Start it, and end it whatever happens."""
    out = directory / "serve.log"
    with out.open("wb") as log:
        process = subprocess.Popen(
            (sys.executable, "-m", "testproject.serve"),
            cwd=directory,
            env=child_environment(
                {"PORT": port, "APP": app, "BANK_SECONDS": "0", "TMPDIR": directory}
            ),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield process, out.read_text
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


@pytest.mark.parametrize(
    ("how", "app"),
    [
        pytest.param(signal.SIGTERM, "django", marks=pytest.mark.wide),
        (signal.SIGTERM, "fastapi"),
        pytest.param(signal.SIGKILL, "django", marks=pytest.mark.wide),
    ],
)
def test_it_serves_and_stops_whole(tmp_path: Path, how: signal.Signals, app: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with serving(tmp_path, str(port), app) as (process, log):
        wait_for(lambda: "Ctrl-C" in log() or process.poll() is not None, 90, log)
        assert "alice (password alice)" in log()
        web = Web([], tmp_path, {}, "served")
        web.port = port
        for path in ("/", "/login/", "/admin/login/", "/static/payments/pay.js"):
            assert web.ask("GET", path, user=None).status == 200
        pay = partial(web.ask, "POST", "/payments/", ORDER, key=new_key(), user="bob")
        done = web.until(pay, other_than=202)
        assert (done.status, done.replayed) == (200, True)
        where = done.headers["Content-Location"]
        assert where.startswith("/payments/status/" if app == "fastapi" else "/idempotency/")
        assert web.ask("GET", where, user="bob").json["result"] == done.json["result"]
        assert web.ask("GET", where, user="alice").problem() == (404, "unknown_key")
        for answer, told in (
            (web.ask("POST", "/payments/", ORDER, user="bob"), (400, "idempotency_key_missing")),
            (web.ask("POST", "/payments/", {}, key="k", user="bob"), (400, "body_invalid")),
            (web.ask("POST", "/payments/", ORDER, key="k", user=None), (401, "not_authenticated")),
        ):
            assert answer.problem() == told
        (made,) = web.ask("GET", "/payments/", user="bob").json
        assert made == done.json["result"] | {"created": made["created"]}
        started = [each.pid for each in psutil.Process(process.pid).children(recursive=True)]
        assert len(started) >= 8, "a Redis, and on leashes a web server, beat, a worker and its two"
        process.send_signal(how)
        assert process.wait(40) == (-how if how is signal.SIGKILL else 0), log()
        wait_for(lambda: not any(map(alive, started)), 30, lambda: f"the end of {started}")


def test_it_refuses_a_framework_that_it_does_not_have(tmp_path: Path) -> None:
    with serving(tmp_path, "8000", "flask") as (process, log):
        assert process.wait(60) == 2
        assert "APP is django or fastapi, not 'flask'." in log()
