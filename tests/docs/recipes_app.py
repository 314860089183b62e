"""The app of the recipes: the tasks of the page, a bank, a database, two providers, and a death at any line.

The providers are a database beside the ledger, outside of every process that dies. Given a key again, it says what
it said the first time, as real ones do.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from celery import Celery
from celery.signals import task_postrun, task_prerun, worker_ready

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


# -- death at a line -------------------------------------------------------------------------------------------------


def body_lines(task: Any) -> list[int]:
    """Return the numbers of the lines on which the body of a task stops in a debugger."""
    code = task.run.__func__.__code__ if hasattr(task.run, "__func__") else task.run.__code__
    found = {line for _, _, line in code.co_lines() if line is not None}
    return sorted(found - {code.co_firstlineno})


def _die(subject: str) -> None:
    Ledger.from_env().append("died", subject)
    os.kill(os.getpid(), signal.SIGKILL)


def _trace(frame: FrameType, event: str, _: Any) -> Any:
    """Kill this process before the line that a file names for this order; each file serves once."""
    if event == "call":
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        return _trace if (name, file) == ("pay", "recipes.md") else None
    order = frame.f_locals.get("order_id")
    place = "return" if event == "return" else str(frame.f_lineno)
    with contextlib.suppress(FileNotFoundError):
        (Ledger.from_env().path.parent / f"kill before {place} {order}").unlink()
        _die(str(order))
    return _trace


def _hurry(sender: Any, **_: Any) -> None:
    """Let the main process look after its children all the time, as it else does every five seconds."""
    pool: Any = sender.pool._pool
    sender.hub.call_repeatedly(0.1, pool.maintain_pool)


def _on_prerun(**_: Any) -> None:
    sys.settrace(_trace)


def _on_postrun(**_: Any) -> None:
    sys.settrace(None)


app: Celery | None = None

if SETTINGS_VARIABLE in os.environ and LEDGER_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[SETTINGS_VARIABLE]), Ledger.from_env().path.parent)
    worker_ready.connect(_hurry, weak=False)
    task_prerun.connect(_on_prerun, weak=False)
    task_postrun.connect(_on_postrun, weak=False)
