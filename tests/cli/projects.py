"""The test project on a PostgreSQL of its own, for command lines in processes of theirs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.cli.running import Ran, run_idempotency
from tests.sql import databases as own
from tests.support.servers import need

__all__ = ["TASK", "Project", "open_project"]

TASK = "testproject.payments.tasks.pay"


class Project(NamedTuple):
    """The test project on a PostgreSQL of its own, known here by ``alias``; ``alice`` is a user's primary key."""

    alias: str
    env: dict[str, str]
    redis_url: str
    alice: int

    def run(self, store: str, *words: str) -> Ran:
        url = "django://default"
        if store == "hybrid":
            url = f"hybrid+{self.redis_url}?truth=default&prefix=cache"
        return run_idempotency("testproject", {**self.env, "IDEMPOTENCY_STORE": url}, *words)


@contextlib.contextmanager
def open_project(directory: Path, redis_url: str) -> Iterator[Project]:
    """Make the database, with a user called alice, and drop it in the end."""
    with own.ready(directory):
        need(own.available("postgresql"), "a server of postgresql")
        with own.database("postgresql", directory) as settings:
            alias = own.add_alias("cli_postgresql", settings)
            own.migrate(alias, ())
            env = {
                "DJANGO_SETTINGS_MODULE": "testproject.settings",
                "DATABASE_NAME": settings["NAME"],
                "PGHOST": settings["HOST"],
                "PGPORT": settings["PORT"],
                "PGUSER": settings["USER"],
                "PGPASSWORD": settings["PASSWORD"],
                "REDIS_URL": redis_url,
                "IDEMPOTENCY_STORE": "django://default",
                "BANK_SECONDS": "0",
                "BANK_MOOD_FILE": str(directory / "mood"),
            }
            from django.contrib.auth.models import User

            alice = User.objects.db_manager(alias).create_user("alice").pk
            try:
                yield Project(alias, env, redis_url, alice)
            finally:
                own.drop_alias(alias)
