"""`make serve`: the whole project in one command, and nothing of it left behind."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from tests.http.sites import ORDER, Web, new_key
from tests.support.paths import ROOT
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
        if how is signal.SIGTERM:
            _look_at(web)
        started = descendants(served.process.pid)
        assert len(started) >= 8, "a Redis, and on leashes a web server, beat, a worker and its two"
        served.process.send_signal(how)
        assert served.process.wait(40) == (-how if how is signal.SIGKILL else 0), served.told()
        wait_for(lambda: not any(map(alive, started)), 30, lambda: f"the end of {started}")


def _look_at(web: Web) -> None:
    for path in ("/", "/login/", "/admin/login/", "/static/payments/pay.js"):
        assert web.ask("GET", path, user=None).status == 200
    start = web.ask("GET", "/", user=None).body.decode()
    assert 'href="/pay/"' in start
    assert '<a href="/pay/">pay once</a>' in start, "an empty page says what to do"
    assert 'href="/admin/"' in start
    assert web.ask("GET", "/pay/", user=None).headers["Location"] == "/login/?next=/pay/"
    key = new_key()
    first = web.ask("POST", "/payments/", ORDER, key=key, user="bob")
    assert first.status == 202
    done = web.until(
        lambda: web.ask("POST", "/payments/", ORDER, key=key, user="bob"), other_than=202
    )
    assert (done.status, done.json["result"]["amount"]) == (200, 100)
    now = web.ask("POST", "/payments/now/", ORDER, key=new_key())
    assert now.status == 201
    made = web.ask("GET", "/payments/", user="bob").json
    assert [payment["key"] for payment in made] == [key]


@pytest.mark.parametrize("port", ["65536", pytest.param("http", marks=pytest.mark.wide)])
def test_a_port_that_is_none_is_refused(tmp_path: Path, port: str) -> None:
    with serving(tmp_path, port) as served:
        assert served.process.wait(30) == 2
        assert "PORT" in served.told()


def test_a_port_that_is_taken_is_told(tmp_path: Path) -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        serving(tmp_path, str(taken.getsockname()[1])) as served,
    ):
        assert served.process.wait(60) == 2
        assert "Address already in use" in served.told()
        assert "PORT=" in served.told()


def test_make_hands_its_signal_on(tmp_path: Path) -> None:
    """A shell between make and the project would end alone, and leave all the rest at work."""
    asked = subprocess.run(
        ("make", "--dry-run", "--no-print-directory", "serve", "PORT=8123"),
        cwd=ROOT,
        # Not those of a make that runs these tests.
        env={k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))},
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert (
        asked.stdout.splitlines()[-1]
        == 'exec env PORT="8123" .venv/bin/python -m testproject.serve'
    )


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory in which ``make serve`` finds all made already, with this very Python."""
    (tmp_path / "bin").mkdir()
    for name in ("setup.cfg", "pyproject.toml", ".created", ".demo"):
        (tmp_path / name).touch()
    python = tmp_path / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return tmp_path


@pytest.mark.wide
def test_ctrl_c_in_a_terminal_stops_make_serve_whole(made: Path) -> None:
    """The terminal tells the whole group in its foreground: make, the project, whatever else is in it."""
    marker = f"SERVED_BY_{new_key().replace('-', '_')}"
    env = child_environment({"BANK_SECONDS": "0", "TMPDIR": str(made), marker: "1"})
    env = {k: v for k, v in env.items() if not k.startswith(("MAKE", "MFLAGS"))}
    master, terminal = pty.openpty()
    process = subprocess.Popen(
        ("make", "-f", str(ROOT / "Makefile"), "serve", "VENV=.", f"PORT={free_port()}"),
        cwd=made,
        env=env,
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )
    os.close(terminal)
    told = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the terminal is closed by all
            while chunk := os.read(master, 4096):
                told.extend(chunk)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        wait_for(
            lambda: b"Ctrl-C ends it" in told or process.poll() is not None,
            90,
            lambda: told.decode(),
        )
        # make, the project, a Redis, and on leashes a web server, beat, a worker and its two
        wait_for(lambda: len(_of(marker)) >= 11, 30, lambda: f"all of them: {_of(marker)}")
        assert list(made.glob("celery-idempotent-serve-*"))
        os.write(master, b"\x03")
        process.wait(40)
        wait_for(lambda: not _of(marker), 30, lambda: f"the end of {_of(marker)}")
        reader.join(10)
        assert b"Stopped." in told
        assert b"Traceback" not in told
        assert not list(made.glob("celery-idempotent-serve-*"))
    finally:
        for pid in _of(marker):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(10)
        os.close(master)


def _of(marker: str) -> dict[int, str]:
    """Return the processes that have a variable in their environment, with their names."""
    found = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and marker in process.environ():
                found[process.pid] = process.name()
    return found
