"""Programs that CI gets from its Debian; on a laptop they are there, or what needs them is skipped."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

#: Where Debian keeps what only root looks for.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"])
#: So that no service is started that nobody asked for.
_QUIET = {"RUNLEVEL": "1", "DEBIAN_FRONTEND": "noninteractive"}


def program(*names: str, package: str) -> str | None:
    """Return the path of the first of these programs, which CI installs, or ``None``."""
    found = _find(names)
    if found or not (os.environ.get("CI") and os.geteuid() == 0 and shutil.which("apt-get")):
        return found
    # One process of the tests at a time: apt-get does not wait for another.
    with Path(tempfile.gettempdir(), "celery-idempotent-apt").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _find(names):
            environment = {**os.environ, **_QUIET}
            for words in (("update",), ("install", "-y", "--no-install-recommends", package)):
                command = ("apt-get", "-q", *words)
                subprocess.run(command, check=False, timeout=600, env=environment)
    return _find(names)


def _find(names: tuple[str, ...]) -> str | None:
    return next((path for name in names if (path := shutil.which(name, path=_PATH))), None)
