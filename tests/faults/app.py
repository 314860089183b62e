"""The app of the fault tests: a worker makes it from its environment, a test for itself."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from celery import Celery, Task
from celery.exceptions import SoftTimeLimitExceeded
from celery.signals import worker_ready
from celery.utils.dispatch import Signal

from celery_idempotent import IdempotentTask, signals
from tests.support.apps import hurry
from tests.support.ledger import LEDGER_VARIABLE, Ledger

BROKER, BACKEND, CONF = "FAULTS_BROKER", "FAULTS_BACKEND", "FAULTS_CONF"


def make_app(broker: str, backend: str | None, conf: dict[str, Any]) -> Celery:
    """Return an app with every task of these tests."""
    app = Celery("faults", broker=broker, backend=backend or None, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        idempotency_sweep_interval=None,
        result_expires=600,
        # What a lost connection to the broker costs shall be known, not found out.
        broker_connection_timeout=2,
        **conf,
    )
    keyed: dict[str, Any] = {
        "shared": False,
        "bind": True,
        "base": IdempotentTask,
        "idempotency_key": "key",
        # How a run goes is no part of what it is for.
        "idempotency_fingerprint": ("key",),
    }

    again: dict[str, Any] = {"retry_on_worker_lost": True, "default_retry_delay": 1}
    for name, options in {
        "work": {},
        "early": {"acks_late": False},
        "sent_again": {"acks_late": True, **again},
        "sent_again_early": {"acks_late": False, **again},
        "never_retried": {"max_retries": 0},
    }.items():
        app.task(name=name, **options, **keyed)(play)

    @app.task(name="value", **keyed)
    def value(self: Any, key: str, what: str) -> Any:
        Ledger.from_env().append("effect", key, self.request.id)
        return {1, 2}

    @app.task(name="struck", **keyed)
    def struck(self: Any, key: str, strike_at: int) -> Any:
        Ledger.from_env().append("effect", key, self.request.id)
        return Striking(strike_at)

    class StruckBefore(IdempotentTask):
        abstract = True

        def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
            Striking(args[1]).__json__()

    app.task(name="struck_before", **{**keyed, "base": StruckBefore})(struck.run)

    @app.task(name="calls", **keyed)
    def calls(self: Any, key: str, task: str, strike_at: int) -> str:
        try:
            app.tasks[task].apply((f"inner {key}", strike_at))
        except SoftTimeLimitExceeded:
            return "limited"
        return "not limited"

    @app.task(name="hold", shared=False, bind=True, base=Task, ignore_result=True)
    def hold(self: Any, gate: str) -> None:
        Ledger.from_env().append("held", gate)
        wait_at(gate)

    return app


class Striking:
    """A value that has the soft time limit strike while it is encoded for the n-th time: by us, then by Celery."""

    def __init__(self, strike_at: int) -> None:
        self.left = strike_at

    def __json__(self) -> str:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGUSR1)
        return "struck"


def play(self: Any, key: str, how: str = "", gate: str = "") -> str:
    """Note a start, do as told, note an effect, as the last thing before the return."""
    ledger = Ledger.from_env()
    ledger.append("start", key, self.request.id)
    first = ledger.count("start", key) == 1
    if how == "fails":
        raise ValueError(key)
    if how == "fails once" and first:
        raise ValueError(key)
    if how == "fails at the gate once" and first:
        wait_at(gate)
        raise ValueError(key)
    if how == "retries at the gate once" and first:
        wait_at(gate)
        raise self.retry(countdown=0.1)
    if how == "hangs once" and first:
        wait_at("never")
    if how == "hangs deaf once" and first:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        wait_at("never")
    if how == "kills":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "makes sure":
        self.idempotency.ensure()
    if how == "keeps soft limits off":
        with contextlib.suppress(Exception):
            wait_at(gate)
    wait_at(gate)
    ledger.append(f"retries {self.request.retries}", key, self.request.id)
    ledger.append("effect", key, self.request.id)
    return f"done by {self.request.id}"


def gate_path(gate: str) -> Path:
    """Return the file whose existence opens a gate."""
    return Path(os.environ[LEDGER_VARIABLE]).parent / f"gate-{gate}"


def wait_at(gate: str) -> None:
    """Wait until the test opens the gate."""
    if not gate:
        return
    give_up = time.monotonic() + 60
    while not gate_path(gate).exists() and time.monotonic() < give_up:
        time.sleep(0.01)


def note_signals() -> None:
    """Have every outcome noted in the ledger, as ``signal <name>``."""
    for name, each in vars(signals).items():
        if not isinstance(each, Signal):
            continue

        def note(sender: Any, event: signals.Event, name: str = name, **_: Any) -> None:
            key = event.identity.key if event.identity else ""
            Ledger.from_env().append(f"signal {name}", key, event.task_id)

        each.connect(note, weak=False)


if BROKER in os.environ:
    app = make_app(os.environ[BROKER], os.environ[BACKEND], json.loads(os.environ[CONF]))
    note_signals()
    worker_ready.connect(hurry, weak=False)
