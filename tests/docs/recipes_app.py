"""The app of the recipes: the tasks of the page, a bank, a database and two providers.

The providers are a database beside the ledger, outside of every process that dies. Given a key again, it says what
it said the first time, as real ones do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import worker_ready

from tests.support.apps import hurry
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.pages import load

SETTINGS_VARIABLE = "CELERY_IDEMPOTENT_TEST_SETTINGS"

#: How long a gate may stay closed before a run gives up: longer than any test waits.
_GATE_SECONDS = 60


def make_app(settings: Mapping[str, Any], directory: Path) -> Celery:
    """Return an app with the tasks of the page; ``directory`` is where the world outside is."""
    app = Celery("recipes", set_as_current=False)
    app.conf.update(settings)
    given = {
        "bank": Bank(directory),
        "database": lambda: contextlib.closing(connect(directory)),
        "provider": Provider(directory, "charge"),
        "mailer": Provider(directory, "receipt"),
    }
    for title in ("fenced write", "provider key", "two providers"):
        load(app, "recipes", title, given)
    return app


def connect(directory: Path) -> sqlite3.Connection:
    """Open the database of the world outside; each statement is a transaction."""
    db = sqlite3.connect(directory / "world.sqlite", timeout=30, isolation_level=None)
    db.execute(
        "CREATE TABLE IF NOT EXISTS account (id TEXT PRIMARY KEY, balance INT, fence BIGINT)"
    )
    db.execute(
        "CREATE TABLE IF NOT EXISTS effect"
        " (provider TEXT, key TEXT, subject TEXT, answer TEXT, PRIMARY KEY (provider, key))"
    )
    return db


class Bank:
    """Says what the file ``balance <account>`` held when it was asked; a file ``closed …`` holds the answer back."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def balance(self, account: str) -> int:
        balance = int((self.directory / f"balance {account}").read_text())
        Ledger.from_env().append("asked", account)
        until = time.monotonic() + _GATE_SECONDS
        while (self.directory / f"closed {balance} {account}").exists():
            if time.monotonic() > until:
                raise TimeoutError("the bank stayed closed")
            time.sleep(0.02)
        return balance


class Provider:
    """Takes effect once per key; dies with its caller, once, if the file ``kill after …`` says so."""

    def __init__(self, directory: Path, name: str) -> None:
        self.directory, self.name = directory, name

    def charge(self, order_id: str, cents: int, *, idempotency_key: str) -> dict[str, Any]:
        return self._once(order_id, idempotency_key, {"cents": cents})

    def send(self, order_id: str, text: str, *, idempotency_key: str) -> dict[str, Any]:
        return self._once(order_id, idempotency_key, {"text": text})

    def _once(self, subject: str, key: str, answer: dict[str, Any]) -> dict[str, Any]:
        Ledger.from_env().append(self.name, subject)
        answer |= {"id": uuid.uuid4().hex}
        with contextlib.closing(connect(self.directory)) as db:
            db.execute(
                "INSERT OR IGNORE INTO effect VALUES (?, ?, ?, ?)",
                (self.name, key, subject, json.dumps(answer)),
            )
            kept = db.execute(
                "SELECT answer FROM effect WHERE provider = ? AND key = ?", (self.name, key)
            ).fetchone()
        with contextlib.suppress(FileNotFoundError):
            (self.directory / f"kill after {self.name} {subject}").unlink()
            _die(subject)
        found: dict[str, Any] = json.loads(kept[0])
        return found


def _die(subject: str) -> None:
    Ledger.from_env().append("died", subject)
    os.kill(os.getpid(), signal.SIGKILL)


app: Celery | None = None

if SETTINGS_VARIABLE in os.environ and LEDGER_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[SETTINGS_VARIABLE]), Ledger.from_env().path.parent)
    worker_ready.connect(hurry, weak=False)
