"""A database of the benchmark's own, for the children that measure it."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import SplitResult, urlsplit

#: By name: the variable that has the address of the server, the address without it, and Django's name of the engine.
SERVERS = {
    "PostgreSQL": ("CELERY_IDEMPOTENT_POSTGRESQL_URL", "//postgres@127.0.0.1:5432", "postgresql"),
    "MariaDB": ("CELERY_IDEMPOTENT_MARIADB_URL", "//root@127.0.0.1:3306", "mysql"),
}


def available() -> list[str]:
    """Return the names of the servers that are there."""
    return [name for name in SERVERS if _listens(_address(name))]


def _address(name: str) -> SplitResult:
    variable, default, _ = SERVERS[name]
    return urlsplit(os.environ.get(variable, default))


def _listens(address: SplitResult) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((address.hostname or "127.0.0.1", address.port or 0)) == 0


@contextlib.contextmanager
def open_database(server: str) -> Iterator[None]:
    """Set up Django with a new database, in which are the tables; drop it in the end."""
    import django
    import pymysql
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections

    pymysql.install_as_MySQLdb()
    name = f"bench_idempotent_{uuid.uuid4().hex[:12]}"
    address = _address(server)
    engine = SERVERS[server][2]
    database = {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": {"postgresql": "postgres"}.get(engine, engine),  # the one that each server has
        "USER": address.username or "",
        "PASSWORD": address.password or "",
        "HOST": address.hostname or "",
        "PORT": str(address.port or ""),
    }
    settings.configure(
        DATABASES={"default": {**database, "NAME": name}, "maintenance": database},
        INSTALLED_APPS=["celery_idempotent.django"],
        USE_TZ=True,
    )
    django.setup()
    try:
        execute(f"CREATE DATABASE {name}", alias="maintenance")
        call_command("migrate", verbosity=0)
        yield
    finally:
        connections.close_all()
        force = " WITH (FORCE)" if engine == "postgresql" else ""
        execute(f"DROP DATABASE IF EXISTS {name}{force}", alias="maintenance")
        connections.close_all()


def execute(sql: str, params: Sequence[Any] = (), *, alias: str = "default") -> None:
    """Run a statement."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params or None)
