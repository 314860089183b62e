"""A PostgreSQL database of the benchmark's own, for the children that measure it."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

__all__ = ["VARIABLE", "available", "execute", "open_database", "open_databases", "rows", "set_up"]

VARIABLE = "CELERY_IDEMPOTENT_POSTGRESQL_URL"
_URL = os.environ.get(VARIABLE, "postgresql://postgres@127.0.0.1:5432")


def available() -> bool:
    """Is there a server, and what it takes to talk to it?"""
    parts = urlsplit(_URL)
    try:
        import django  # noqa: F401
        import psycopg  # noqa: F401
    except ImportError:
        return False
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((parts.hostname or "127.0.0.1", parts.port or 5432)) == 0


@contextlib.contextmanager
def open_database() -> Iterator[str]:
    """Set up Django with a new database, in which are the tables; give its name, drop it in the end."""
    with open_databases("default") as (name,):
        yield name


@contextlib.contextmanager
def open_databases(*aliases: str) -> Iterator[Sequence[str]]:
    """Set up Django with a new database for each of these aliases; give their names, drop them in the end."""
    names = {alias: f"bench_idempotent_{uuid.uuid4().hex[:12]}" for alias in aliases}
    set_up(**names)
    from django.core.management import call_command
    from django.db import connections

    try:
        for alias, name in names.items():
            execute(f"CREATE DATABASE {name}", alias="maintenance")
            call_command("migrate", verbosity=0, database=alias)
        yield tuple(names.values())
    finally:
        connections.close_all()
        for name in names.values():
            execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", alias="maintenance")
        connections.close_all()


def set_up(**names: str) -> None:
    """Set up Django with a database of this name for each alias."""
    import django
    from django.conf import settings

    parts = urlsplit(_URL)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
    }
    named = {alias: {**database, "NAME": name} for alias, name in names.items()}
    settings.configure(
        DATABASES={"default": database, **named, "maintenance": database},
        INSTALLED_APPS=["celery_idempotent.django"],
        USE_TZ=True,
    )
    django.setup()


def execute(sql: str, params: Sequence[Any] = (), *, alias: str = "default") -> None:
    """Run a statement."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params or None)


def rows(sql: str, params: Sequence[Any] = (), *, alias: str = "default") -> list[tuple[Any, ...]]:
    """Run a query."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params or None)
        return list(cursor.fetchall())
