"""What the apps of worker tests share: their settings come in by the environment, their tasks wait at gates."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from celery_idempotent.celery import republish

if TYPE_CHECKING:
    from celery import Celery

#: What a worker shall be like, as JSON.
_VARIABLE = "CELERY_IDEMPOTENT_TEST_SETTINGS"


def environment(settings: Mapping[str, Any], **more: object) -> dict[str, str]:
    """Return what makes a worker use these settings, and find ``more`` in :func:`wanted`."""
    return {_VARIABLE: json.dumps({"settings": settings, **more})}


def wanted() -> dict[str, Any] | None:
    """Return what :func:`environment` was given, in the worker; ``None`` in a test."""
    found: dict[str, Any] | None = json.loads(os.environ.get(_VARIABLE, "null"))
    return found


def configure(app: Celery, settings: Mapping[str, Any]) -> None:
    """Give the settings to an app; ``longest_pause`` is the longest countdown of a copy, in seconds."""
    if pause := settings.get("longest_pause"):
        republish._LONGEST.update(dict.fromkeys(republish._LONGEST, pause))
    app.conf.update(settings)


def close_app(app: Celery) -> None:
    """Close an app that a test made in its own process."""
    forget_results(app.backend)
    app.close()


def forget_results(backend: Any) -> None:
    """Have no result cancel its subscription when it is collected.

    The server of the test is gone by then, and Celery tries for minutes to reach it.
    """
    consumer = getattr(backend, "result_consumer", None)
    if consumer is not None:
        consumer.subscribed_to.clear()
        consumer.stop()
        consumer._pubsub = None


def wait_at(gate: str, seconds: float = 90) -> None:
    """Return when the file ``gate`` exists; ``seconds`` are longer than any test waits."""
    until = time.monotonic() + seconds
    while gate and not Path(gate).exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{gate} stayed closed")
        time.sleep(0.02)


def hurry(sender: Any, **_: Any) -> None:
    """Let the main process look after its children all the time (``worker_ready``), as it else does every 5 s.

    Celery hears of a lost child either at once or by that look.
    """
    pool: Any = getattr(sender.pool, "_pool", None)
    if pool is not None and hasattr(pool, "maintain_pool"):
        sender.hub.call_repeatedly(0.1, pool.maintain_pool)


def redefine(task: Any, **options: Any) -> None:
    """Define a task anew, with other options: a running process reads them once."""
    kind = type(task.app.tasks[task.name])
    for name, value in options.items():
        setattr(kind, name, value)
    kind.bind(task.app)
