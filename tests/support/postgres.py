"""The command of a PostgreSQL server that chaos may strike, of the machine's programs."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from tests.support.debian import program
from tests.support.servers import need

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
