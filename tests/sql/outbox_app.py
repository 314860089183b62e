"""The app of the outbox's fault tests: a worker makes it from its environment, a test for itself."""

from __future__ import annotations

import json
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from celery.signals import after_task_publish

from tests.support.ledger import LEDGER_VARIABLE, Ledger

SETTINGS = "OUTBOX_FAULTS_SETTINGS"

#: So soon a sweep takes the sender for dead.
LEASE_MS = 1000

#: What the tasks write to: each step of each story, as often as it took effect.
TABLE = "outbox_faults_effects"


def make_app(settings: dict[str, Any]) -> Celery:
    """Return an app with every task of these tests; Django is set up already."""
    from django.db import connections, transaction

    from celery_idempotent.django import IdempotentTask, outbox

    outbox.LEASE_MS = LEASE_MS
    outbox.BACKOFF_MS = 100
    app = Celery("outbox-faults", set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_connection_timeout=2,
        idempotency_sweep_interval=None,
        idempotency_lease=10,
        task_ignore_result=True,
        task_publish_retry=False,
        task_routes=(refuse_cursed,),
        worker_prefetch_multiplier=1,
        **settings,
    )
    alias = app.conf.idempotency_store.partition("://")[2]
    atomic: dict[str, Any] = {
        "shared": False,
        "base": IdempotentTask,
        "idempotency_key": ("story", "step"),
        "idempotency_fingerprint": ("story", "step"),
        "idempotency_atomic": True,
    }

    def write(story: str, step: int) -> None:
        with connections[alias].cursor() as cursor:
            cursor.execute(f"INSERT INTO {TABLE} (story, step) VALUES (%s, %s)", [story, step])

    @app.task(name="follow", **atomic)
    def follow(story: str, step: int) -> None:
        """One of the things that follow from a story."""
        Ledger.from_env().append("run", f"{story} {step}")
        write(story, step)

    @app.task(name="cursed", **atomic)
    def cursed(story: str, step: int) -> None:
        follow.run(story, step)

    @app.task(name="begin", **atomic)
    def begin(story: str, step: int, how: str = "", follow_ups: int = 3) -> None:
        """Write, and tell so many others."""
        Ledger.from_env().append("run", f"{story} {step}")
        write(story, step)
        if how == "dies before sending":
            transaction.on_commit(die, using=alias)
        if how == "dies after sending two":
            dies_after(2)
        for number in range(1, follow_ups + 1):
            task: Any = cursed if how == "cursed" and number == 2 else follow
            task.delay_on_commit(story, step + number)
        wait_at(f"{story} may commit")

    @app.task(name="pass_on", **atomic)
    def pass_on(story: str, step: int, last: int) -> None:
        """Write, tell the next one, and die: before that is sent, or right after it, by turns."""
        Ledger.from_env().append("run", f"{story} {step}")
        write(story, step)
        if step == last:
            return
        if step % 2:
            transaction.on_commit(die, using=alias)
        else:
            dies_after(1)
        pass_on.delay_on_commit(story, step + 1, last)

    return app


def refuse_cursed(name: str, *_: Any, **__: Any) -> None:
    """Fail to route one task while its curse lasts."""
    if name == "cursed" and not gate_path("lift the curse").exists():
        raise LookupError("this queue is cursed")


def die() -> None:
    """End as kill -9 does."""
    Ledger.from_env().append("dies")
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after(messages: int) -> None:
    """Die when so many were published, before anything else happens."""
    left = [messages]

    def count(**_: Any) -> None:
        left[0] -= 1
        if not left[0]:
            die()

    after_task_publish.connect(partial(count), weak=False)


def gate_path(gate: str) -> Path:
    """Return the file whose existence opens a gate."""
    return Path(os.environ.get(LEDGER_VARIABLE, "/")).parent / f"gate-{gate}"


def wait_at(gate: str) -> None:
    """Wait until the test opens the gate, if it closed it."""
    give_up = time.monotonic() + 60
    if gate_path(f"{gate} later").exists():
        Ledger.from_env().append("waits")
        while not gate_path(gate).exists() and time.monotonic() < give_up:
            time.sleep(0.01)


if SETTINGS in os.environ:
    import django
    from django.conf import settings as django_settings

    _given = json.loads(os.environ[SETTINGS])
    if "mysql" in str(_given["databases"]):
        import pymysql

        pymysql.install_as_MySQLdb()
    django_settings.configure(
        DATABASES=_given.pop("databases"),
        INSTALLED_APPS=["celery_idempotent.django"],
        USE_TZ=True,
        DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    )
    django.setup()
    app = make_app(_given)
