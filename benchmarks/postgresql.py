"""A PostgreSQL database of the benchmark's own, for the children that measure it."""

from __future__ import annotations

import contextlib
import os
import socket
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import urlsplit

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
def open_database() -> Iterator[None]:
    """Set up Django with a new database, in which are the tables; drop it in the end."""
    import django
    from django.conf import settings
    from django.core.management import call_command
    from django.db import connections

    name = f"bench_idempotent_{uuid.uuid4().hex[:12]}"
    parts = urlsplit(_URL)
    database = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
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
        execute(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)", alias="maintenance")
        connections.close_all()


def execute(sql: str, params: Sequence[Any] = (), *, alias: str = "default") -> None:
    """Run a statement."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params or None)
