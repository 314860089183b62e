"""The site with its records in a PostgreSQL database of the tests' own, alone or behind a cache."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg

from tests.http.sites import Site, Web, new_key, open_site
from tests.support.servers import embedded_redis, need

__all__ = ["Bank", "at_work", "made", "open_bank"]

_SERVER = os.environ.get("CELERY_IDEMPOTENT_POSTGRESQL_URL", "postgresql://postgres@127.0.0.1:5432")

Rows = psycopg.Connection[Any]


@dataclass(kw_only=True)
class Bank(Site):
    """A site whose records are in its database; ``rows`` looks at that from outside."""

    rows: Rows

    @contextlib.contextmanager
    def another(self) -> Iterator[Web]:
        """Start another web server of the site, to be lost."""
        command = [sys.executable, "-m", "testproject.web", "0"]
        web = Web(command, self.directory, self.env, f"another-{new_key()}")
        self.children.append(web)
        try:
            yield web.start()
        finally:
            self.mood(None)
            web.kill()


@contextlib.contextmanager
def open_bank(directory: Path, *, hybrid: bool = False) -> Iterator[Bank]:
    """Start the site on a new database; each of its requests is a transaction there."""
    with contextlib.ExitStack() as stack:
        name = stack.enter_context(_database())
        server = urlsplit(_SERVER)
        settings = {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": name,
            "HOST": server.hostname,
            "PORT": server.port or 5432,
            "USER": server.username or "postgres",
            "PASSWORD": server.password or "",
            "ATOMIC_REQUESTS": True,
        }
        cache = stack.enter_context(embedded_redis()) if hybrid else None
        env = {
            "TEST_DATABASE": json.dumps(settings),
            "IDEMPOTENCY_STORE": (
                "django://default" if cache is None else f"hybrid+{cache.url()}?truth=default"
            ),
        }
        redis = stack.enter_context(embedded_redis())
        site = stack.enter_context(open_site(directory, redis, env=env))
        rows = stack.enter_context(psycopg.connect(f"{_SERVER}/{name}", autocommit=True))
        yield Bank(**vars(site), rows=rows)


@contextlib.contextmanager
def _database() -> Iterator[str]:
    try:
        server = psycopg.connect(f"{_SERVER}/postgres", autocommit=True, connect_timeout=5)
    except psycopg.OperationalError:
        need(False, "PostgreSQL")
        raise
    name = f"test_idempotent_http_{uuid.uuid4().hex[:12]}"
    server.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]  # a name of our own
    try:
        yield name
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[call-overload]  # as above
        server.close()


def made(rows: Rows, key: str) -> int:
    """Count the payments that are committed with a key."""
    found = rows.execute("SELECT count(*) FROM payments_payment WHERE key = %s", (key,)).fetchone()
    return int(found[0]) if found else 0


def at_work(rows: Rows) -> bool:
    """Has a payment been entered, and not yet committed?"""
    found = rows.execute(
        "SELECT 1 FROM pg_locks WHERE relation = 'payments_payment'::regclass AND mode = 'RowExclusiveLock'"
    )
    return found.fetchone() is not None
