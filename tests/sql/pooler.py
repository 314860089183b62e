"""A PgBouncer of the tests' own: on a free port, with its own configuration, not as root."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.support.waiting import wait_for

__all__ = ["pgbouncer"]


@contextlib.contextmanager
def pgbouncer(binary: str, settings: dict[str, Any], **options: Any) -> Iterator[dict[str, str]]:
    """Pool the sessions of a database in transaction mode; give what its settings are behind it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    chosen = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "trust",
        "pool_mode": "transaction",
        **options,
    }
    # Not in pytest's folder, which is for nobody but the user of the tests.
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        users, config = directory / "users.txt", directory / "pgbouncer.ini"
        users.write_text(f'"{settings["USER"]}" "{settings["PASSWORD"]}"\n')
        lines = [
            "[databases]",
            f"{settings['NAME']} = host={settings['HOST']} port={settings['PORT']}",
            "[pgbouncer]",
            f"auth_file = {users}",
            *(f"{key} = {value}" for key, value in chosen.items()),
        ]
        config.write_text("\n".join(lines) + "\n")
        root: dict[str, Any] = {"user": "nobody", "extra_groups": []} if os.geteuid() == 0 else {}
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen([binary, str(config)], stdout=log, stderr=log, **root)
        try:
            wait_for(
                lambda: process.poll() is not None or _answers(port),
                30,
                lambda: (directory / "log").read_text(),
            )
            assert process.poll() is None, (directory / "log").read_text()
            yield {"HOST": "127.0.0.1", "PORT": str(port)}
        finally:
            process.terminate()
            process.wait(30)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
