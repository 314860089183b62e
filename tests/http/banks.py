"""The site with its records in a PostgreSQL database of the tests' own, alone or behind a cache."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from tests.http.sites import Site, Web, new_key, open_site
from tests.sql import databases
from tests.support.servers import embedded_redis, need

__all__ = ["Bank", "at_work", "made", "open_bank"]

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
        stack.enter_context(databases.ready(directory))
        need(databases.available("postgresql"), "PostgreSQL")
        settings = stack.enter_context(databases.database("postgresql", directory))
        cache = stack.enter_context(embedded_redis()) if hybrid else None
        truth = f"hybrid+{cache.url()}?truth=default" if cache else "django://default"
        env = {
            "TEST_DATABASE": json.dumps({**settings, "ATOMIC_REQUESTS": True}),
            "IDEMPOTENCY_STORE": truth,
        }
        redis = stack.enter_context(embedded_redis())
        site = stack.enter_context(open_site(directory, redis, env=env))
        names = ("HOST", "PORT", "USER", "PASSWORD")
        where = {name.lower(): settings[name] for name in names}
        rows = psycopg.connect(dbname=settings["NAME"], autocommit=True, **where)
        stack.enter_context(rows)
        yield Bank(**vars(site), rows=rows)


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
