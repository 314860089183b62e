"""An app whose bases run each task in a database transaction, as a project's own base does."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from celery import Celery, Task

from celery_idempotent import IdempotentTask
from tests.support.ledger import LEDGER_VARIABLE, Ledger


@contextmanager
def transaction(key: str, fate: str) -> Iterator[None]:
    """Commit one row for the key; the first one is rolled back (``fate``), or dies before the commit."""
    first = not Ledger.from_env().count("wrapped", key)
    Ledger.from_env().append("wrapped", key)
    # The inner block commits, or rolls back what raises; it does not close.
    with closing(sqlite3.connect(os.environ["BASES_DATABASE"], timeout=30)) as database, database:
        database.execute("CREATE TABLE IF NOT EXISTS effect (key TEXT)")
        database.execute("INSERT INTO effect VALUES (?)", (key,))
        yield
        if first and fate == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if first and fate == "rolls back":
            raise RuntimeError("could not serialize access")


def effects(path: Path, key: str) -> int:
    """Return how many rows there are for the key."""
    with closing(sqlite3.connect(path, timeout=30)) as database:
        (count,) = database.execute("SELECT count(*) FROM effect WHERE key = ?", (key,)).fetchone()
    return int(count)


class Transactional:
    """A mixin for any task class."""

    def __call__(self, key: str, fate: str = "") -> Any:
        with transaction(key, fate):
            return super().__call__(key, fate)  # type: ignore[misc]


class PlainTransactional(Transactional, Task):  # type: ignore[type-arg]
    abstract = True


def make_app(url: str) -> Any:
    app = Celery("bases", broker=url, backend=url, task_cls=IdempotentTask, set_as_current=False)
    app.conf.broker_connection_retry_on_startup = True
    bases: dict[str, tuple[Any, ...]] = {
        "before": (Transactional, app.Task),
        "after": (app.Task, PlainTransactional),
    }
    for name, parents in bases.items():
        base = type(name, parents, {"abstract": True})

        @app.task(name=name, base=base, bind=True, shared=False, idempotency_key="key")
        def charge(self: Any, key: str, fate: str = "") -> str:
            return f"{key} as {self.request.id}"

    return app


app = make_app(os.environ["BASES_REDIS_URL"]) if LEDGER_VARIABLE in os.environ else None
