"""The app of the migration tests: the tasks of every page, as they were and as they are to be.

The bodies do what files tell them: ``closed`` makes them wait, ``kill`` takes their process down, ``fail`` makes them
fail, each for one key, the last two only once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from celery import Celery, Task, current_task
from celery.signals import worker_ready

from tests.support.apps import hurry, wanted
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.pages import load

PAGES = ("celery-once", "celery-singleton", "redis-lock")

#: How long a gate may stay closed before a run gives up: longer than any test waits.
_GATE_SECONDS = 60


def make_app(settings: Mapping[str, Any]) -> Celery:
    """Return an app with the tasks of every page."""
    import redis

    app = Celery("migrations", set_as_current=False)
    backend = settings["result_backend"]
    once = {"url": backend, "default_timeout": 3600}
    app.conf.update(settings, ONCE={"backend": "celery_once.backends.Redis", "settings": once})
    given = {
        "work": work,
        "client": redis.Redis.from_url(backend),
        "TemporaryError": TemporaryError,
    }
    for page in PAGES:
        for title in ("before", "after"):
            load(app, "migrating", f"{page} {title}", given)
    app.task(name="fence", base=Task, shared=False)(fence)
    return app


class TemporaryError(Exception):
    """Something that is better in a moment."""


def order(directory: Path, word: str, key: str) -> Path:
    """Return the file that tells the work on ``key`` what to do."""
    return directory / f"{word} {key}"


def work(key: str, *_: Any) -> str:
    """Do what the files say; no two runs return the same."""
    ledger = Ledger.from_env()
    directory = ledger.path.parent
    ledger.append("start", key, current_task.request.id)
    for word in ("kill", "fail"):
        with contextlib.suppress(FileNotFoundError):
            order(directory, word, key).unlink()
            if word == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise TemporaryError(key)
    until = time.monotonic() + _GATE_SECONDS
    # Each run has a gate of its own, and the first is closed by the test.
    mine = order(directory, f"closed{ledger.count('start', key)}", key)
    while mine.exists():
        if time.monotonic() > until:
            raise TimeoutError(f"{mine} stayed closed")
        time.sleep(0.02)
    ledger.append("end", key, current_task.request.id)
    return uuid.uuid4().hex


def fence() -> None:
    """Do nothing: whatever was sent before this has arrived."""


app: Celery | None = None

if _wanted := wanted():
    app = make_app(_wanted["settings"])
    if LEDGER_VARIABLE in os.environ:
        worker_ready.connect(hurry, weak=False)
