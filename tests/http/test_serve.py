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
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.http.sites import ORDER, Web, new_key
from tests.support.waiting import wait_for
from tests.support.workers import alive, child_environment

Served = Any


@contextlib.contextmanager
def serving(directory: Path, port: str) -> Iterator[Served]:
    """Start it, and end it whatever happens."""
    out = directory / "serve.log"
    with out.open("wb") as log:
        process = subprocess.Popen(
            (sys.executable, "-m", "testproject.serve"),
            cwd=directory,
            env=child_environment({"PORT": port, "BANK_SECONDS": "0", "TMPDIR": directory}),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield SimpleNamespace(process=process, told=lambda: out.read_text())
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(30)
        process.kill()


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return str(found.getsockname()[1])


def descendants(pid: int) -> list[int]:
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


@pytest.mark.parametrize(
    "how", [signal.SIGTERM, pytest.param(signal.SIGKILL, marks=pytest.mark.wide)]
)
def test_it_serves_and_stops_whole(tmp_path: Path, how: signal.Signals) -> None:
    port = free_port()
    with serving(tmp_path, port) as served:
        wait_for(
            lambda: "Ctrl-C" in served.told() or served.process.poll() is not None, 90, served.told
        )
        assert "alice (password alice)" in served.told()
        web = Web([], tmp_path, {}, "served")
        web.port = int(port)
        for path in ("/", "/login/", "/admin/login/", "/static/payments/pay.js"):
            assert web.ask("GET", path, user=None).status == 200
        pay = partial(web.ask, "POST", "/payments/", ORDER, key=new_key(), user="bob")
        assert web.until(pay, other_than=202).status == 200
        started = descendants(served.process.pid)
        assert len(started) >= 8, "a Redis, and on leashes a web server, beat, a worker and its two"
        served.process.send_signal(how)
        assert served.process.wait(40) == (-how if how is signal.SIGKILL else 0), served.told()
        wait_for(lambda: not any(map(alive, started)), 30, lambda: f"the end of {started}")


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving(tmp_path, str(taken.getsockname()[1])) as served,
    ):
        assert served.process.wait(60) == 2
        assert "Address already in use" in served.told()
        assert "PORT=" in served.told()
