"""A PostgreSQL server that tests may strike, of the machine's programs; gone when its owner is."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.debian import program
from tests.support.servers import embedded, need
from tests.support.waiting import wait_for

USER = "tests"
#: Whom the server runs as where we are root, whom PostgreSQL refuses to serve.
_NOBODY = "nobody"


def prepare(home: Path) -> list[Any]:
    """Make a cluster of databases in ``home``, a folder with a short path; return the command that serves it.

    The server survives the crash of one of its processes, not that of the machine (``-F``).
    """
    postgres = program("postgres", package="postgresql", places="usr/lib/postgresql/*/bin")
    need(postgres, "PostgreSQL's server")
    become: list[Any] = []
    if os.geteuid() == 0:
        shutil.chown(home, _NOBODY)
        become = ["setpriv", f"--reuid={_NOBODY}", "--clear-groups", "--pdeathsig=keep"]
    init = [*become, Path(str(postgres)).with_name("initdb"), "-D", home / "data", "-N"]
    subprocess.run([*init, "-U", USER, "-E", "UTF8"], check=True, capture_output=True, cwd="/")
    return [*become, postgres, "-D", home / "data", "-k", home, "-F"]


class EmbeddedPostgres:
    """A server behind a socket in a directory of its own.

    After :meth:`stop`, which ends every session, :meth:`start` brings it back with its data.
    """

    def __enter__(self) -> EmbeddedPostgres:
        # Not $TMPDIR: a socket's path has to be short, and everybody can get into this one.
        self._directory = Path(tempfile.mkdtemp(prefix="embedded-postgres-", dir="/tmp"))
        self._command = list(map(str, [*prepare(self._directory), "-h", ""]))
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def environment(self) -> Mapping[str, str]:
        """Return the variables that lead PostgreSQL's clients to the server."""
        return {"PGHOST": str(self._directory), "PGUSER": USER, "PGPORT": "5432"}

    def stop(self) -> None:
        """End the server, with every session; its data stays."""
        self._launched.stop()

    def start(self) -> None:
        """Start the server on its data, and wait until its own file says that it is ready."""
        # Fast, with clients cut off; and immediate, which leaves no shared memory behind.
        self._launched = embedded.Launched(
            self._command, directory=self._directory, gentle="SIGINT", crash="SIGQUIT"
        )
        told = self._directory / "data" / "postmaster.pid"
        wait_for(lambda: told.exists() and "ready" in told.read_text().split(), 30, "PostgreSQL")
