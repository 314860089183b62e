"""The app of the leak tests: tasks that end in every way, and a census of what their process holds."""

from __future__ import annotations

import gc
import json
import os
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any

import django
from celery import Celery, Task, signals

CONF = "LEAK_CONF"

django.setup()

from django.db import connection  # noqa: E402

from celery_idempotent.django import IdempotentTask  # noqa: E402
from celery_idempotent.protocol.lease import heartbeat  # noqa: E402
from celery_idempotent.signals import counters, replayed  # noqa: E402

app = Celery("leaks", set_as_current=False)
app.conf.update(json.loads(os.environ[CONF]))
told: Counter[str] = Counter()
_CONTAINERS = (dict, list, set, deque)


@signals.task_success.connect(weak=False)
@signals.task_failure.connect(weak=False)
def _ended(sender: Any = None, **_: Any) -> None:
    if isinstance(sender, IdempotentTask):
        told["ended"] += 1


@replayed.connect(weak=False)
def _replayed(**_: Any) -> None:
    told["replayed"] += 1


def work(self: Any, key: str, how: str) -> str:
    if self.idempotency.transaction is not None:
        with connection.cursor() as cursor:
            cursor.execute("INSERT INTO effects (name) VALUES (%s)", (key,))
    if how == "fails":
        raise ValueError(key)
    if how == "permanent":
        raise LookupError(key)
    if how == "retries" and not self.request.retries:
        raise self.retry(countdown=0)
    if how == "stages":
        follow.delay_on_commit(f"{key} follows")
    if how == "steps":
        self.idempotency.step("charge", str, key)
    return key


keyed: dict[str, Any] = {
    "base": IdempotentTask,
    "idempotency_key": "key",
    "shared": False,
    "idempotency_permanent_errors": (LookupError,),
}
app.task(name="lease", bind=True, **keyed)(work)
if app.conf.get("with_atomic"):
    app.task(name="atomic", bind=True, idempotency_atomic=True, **keyed)(work)


@app.task(name="follow", **keyed)
def follow(key: str) -> str:
    return key


@app.task(name="ended", base=Task, shared=False, ignore_result=False)
def ended() -> int:
    return told["ended"]


@app.task(name="census", base=Task, shared=False, ignore_result=False)
def census() -> dict[str, Any]:
    """Count what is there: objects by type, what is in containers, threads, files, claims that are kept alive."""
    # As the heartbeat does every few seconds, by a connection that is nobody's.
    writing = threading.Thread(target=counters.write)
    writing.start()
    writing.join()
    for _ in range(3):
        gc.collect()
    everything = gc.get_objects()
    return {
        "kinds": Counter(
            f"{type(each).__module__}.{type(each).__qualname__}" for each in everything
        ),
        # Strings and numbers are in no list of objects; whoever keeps them has a container.
        "items": sum(len(each) for each in everything if type(each) in _CONTAINERS),
        "threads": sorted(each.name for each in threading.enumerate()),
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "kept alive": len(heartbeat._due),
        "told": told,
    }
