"""The app of the atomic tests: a payment that is one row, and a process that dies where it is told to.

A plan is a file ``kill-<key>`` in the ledger's folder with a number: the process that runs the key dies by SIGKILL at
that boundary, once. A boundary lies before each statement on any connection, around each COMMIT and each publishing,
and before the acknowledgement. ``hold-<key>`` keeps the payment waiting inside of its transaction.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django
import psycopg
from celery import Celery, signals
from django.db import connection
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.backends.utils import CursorWrapper

from tests.support.ledger import Ledger

CONF = "ATOMIC_CONF"

django.setup()

from celery_idempotent.django import IdempotentTask, outbox  # noqa: E402

# So soon a sweep takes the sender of a message for dead.
outbox.LEASE_MS = 1000

app = Celery("atomic", set_as_current=False)
app.conf.update(json.loads(os.environ[CONF]))
ledger = Ledger.from_env()


class Boundaries:
    """Counts the boundaries of the run in progress, and dies at the planned one."""

    def __init__(self) -> None:
        self.key: str | None = None
        self.passed = 0

    def begin(self, key: str) -> None:
        self.key, self.passed = key, 0

    def plan(self, kind: str) -> Path:
        return Path(ledger.path).parent / f"{kind}-{self.key}"

    def pass_one(self) -> None:
        if self.key is None:
            return
        try:
            at = int(self.plan("kill").read_text())
        except FileNotFoundError:
            at = -1
        self.passed += 1
        if self.passed == at + 1:
            self.plan("kill").rename(self.plan("killed"))
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self) -> None:
        if self.key is not None:
            self.pass_one()
            ledger.append("boundaries", f"{self.key} {self.passed}")
        self.key = None


boundaries = Boundaries()


def around(kind: type, name: str) -> None:
    """Make a boundary before each call of a method, and after each COMMIT."""
    real: Callable[..., Any] = getattr(kind, name)

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        boundaries.pass_one()
        if name != "_commit":
            return real(self, *args, **kwargs)
        found = real(self, *args, **kwargs)
        boundaries.pass_one()
        return found

    setattr(kind, name, method)


around(CursorWrapper, "execute")
around(BaseDatabaseWrapper, "_commit")


class Prepared(psycopg.Cursor[Any]):
    """The cursor of the statements around an atomic run, which is not Django's."""

    def execute(self, *args: Any, **kwargs: Any) -> Any:
        boundaries.pass_one()
        return super().execute(*args, **kwargs)


psycopg.Cursor = Prepared  # type: ignore[misc]


@signals.task_prerun.connect(weak=False)
def _begin(sender: Any = None, args: Any = (), **_: Any) -> None:
    if sender.name in ("pay", "hand_over"):
        boundaries.begin(args[0])


@signals.task_postrun.connect(weak=False)
def _end(sender: Any = None, **_: Any) -> None:
    if sender.name in ("pay", "hand_over"):
        boundaries.end()


@signals.before_task_publish.connect(weak=False)
@signals.after_task_publish.connect(weak=False)
def _published(**_: Any) -> None:
    boundaries.pass_one()


def write(table: str, key: str, token: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"INSERT INTO {table} (name, token) VALUES (%s, %s)", (key, token))


ATOMIC: dict[str, Any] = {
    "base": IdempotentTask,
    "idempotency_key": "key",
    "idempotency_atomic": True,
    "shared": False,
}


@app.task(name="pay", bind=True, **ATOMIC)
def pay(self: Any, key: str, account: str = "") -> str:
    write("effects", key, self.idempotency.token)
    if account:
        with connection.cursor() as cursor:
            cursor.execute("UPDATE accounts SET balance = balance - 1 WHERE name = %s", (account,))
    ledger.append("inside", key, self.request.id)
    hold = Path(ledger.path).parent / f"hold-{key}"
    while hold.exists():
        time.sleep(0.02)
    write("effects", f"{key} again", self.idempotency.token)
    follow.delay_on_commit(key)
    follow.delay_on_commit(f"{key} again")
    return f"paid {key}"


@app.task(base=IdempotentTask, name="follow", shared=False, bind=True)
def follow(self: Any, key: str) -> str:
    ledger.append("followed", key, self.request.id)
    return f"paid {key}"


@app.task(name="hand_over", bind=True, **ATOMIC)
def hand_over(self: Any, key: str) -> None:
    write("effects", key, self.idempotency.token)
    write("effects", f"{key} again", self.idempotency.token)
    follow.delay_on_commit(f"{key} again")
    raise self.replace(follow.s(key))
