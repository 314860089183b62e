"""The app of the pool tests: a worker makes it from its environment, a test for itself."""

from __future__ import annotations

import json
import os
import time
import uuid
from functools import partial
from pathlib import Path
from typing import Any

from celery import Celery
from celery.utils.dispatch import Signal

from celery_idempotent import IdempotentTask, current_claim, signals
from tests.support.ledger import LEDGER_VARIABLE, Ledger

#: The settings of a worker, as JSON.
SETTINGS_VARIABLE = "CELERY_IDEMPOTENT_TEST_SETTINGS"

#: How long a gate may stay closed before a run gives up: longer than any test waits.
_GATE_SECONDS = 60


def make_app(settings: dict[str, Any]) -> Celery:
    """Return an app with every task of these tests."""
    app = Celery("pools", set_as_current=False)
    app.conf.update(settings)
    keyed = partial(
        app.task,
        base=IdempotentTask,
        bind=True,
        shared=False,
        idempotency_key="key",
        # How a run goes is no part of what it is for.
        idempotency_fingerprint=("key",),
    )
    keyed(name="work")(work)

    keyed(name="looking")(looking)

    return app


def work(self: Any, key: str, gate: str = "") -> dict[str, Any]:
    """Take effect once the gate is open; no two runs return the same."""
    _note("start", key)
    wait_at(gate)
    _note("effect", key)
    return {"run": uuid.uuid4().hex, "pid": os.getpid()}


def looking(self: Any, key: str, gate: str) -> list[str]:
    """Look at the current claim again and again while others do the same; return whose it was, each once."""
    _note("start", key)
    wait_at(gate)
    seen: dict[str, None] = {}
    token = self.idempotency.token
    for _ in range(50):
        time.sleep(0)
        claim = current_claim()
        seen[repr(claim and (claim.key, claim.token == token, claim is self.idempotency))] = None
    _note("effect", key)
    return list(seen)


def _note(phase: str, key: str) -> None:
    claim = current_claim()
    Ledger.from_env().append(phase, key, claim.record.task_id if claim else "")


def gate_path(directory: Path, gate: str) -> Path:
    """Return the file whose existence opens a gate."""
    return directory / f"gate-{gate}"


def wait_at(gate: str) -> None:
    """Wait until the test opens the gate."""
    path = gate_path(Path(os.environ[LEDGER_VARIABLE]).parent, gate)
    until = time.monotonic() + _GATE_SECONDS
    while gate and not path.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{path} stayed closed")
        time.sleep(0.02)


def _note_signals() -> None:
    """Have every outcome noted in the ledger, as ``signal <name>``."""

    def note(name: str, sender: Any, event: signals.Event, **_: Any) -> None:
        key = event.identity.key if event.identity else ""
        Ledger.from_env().append(f"signal {name}", key, event.task_id)

    for name, each in vars(signals).items():
        if isinstance(each, Signal):
            each.connect(partial(note, name), weak=False)


app: Celery | None = None

if SETTINGS_VARIABLE in os.environ:
    app = make_app(json.loads(os.environ[SETTINGS_VARIABLE]))
    _note_signals()
