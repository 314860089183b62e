"""What the demo adds to a task in the worker: work that takes time, and a lock around the gap of a store in Redis.

With the records in Redis, a run that is killed after its write to the ledger and before its key is settled writes
again: that gap can only be closed where write and record are one transaction, in the database. While a run is in the
gap it holds a shared lock on a file, and play.py kills only when it gets the lock for itself.
"""

from __future__ import annotations

import fcntl
import functools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

from celery.signals import task_postrun, task_prerun
from django.conf import settings as django_settings
from django.dispatch import receiver

from celery_idempotent import signals
from testproject.demo import settings
from testproject.webhooks.models import Kind, Run
from testproject.webhooks.tasks import about_to_write, written

#: In the demo's directory: the seconds that each delivery takes, the lock, the processes that are in a task, and a
#: line for each outcome of the idempotent task that the report tells of.
PLAN, GAP, BUSY, OUTCOMES = "plan.json", "gap.lock", "busy", "outcomes.log"

#: Whatever was slow at first is quick from its fourth run on: a task that always takes longer than
#: the visibility timeout is redelivered for ever, with Celery's own Task.
QUICK_S = 0.02
_SLOW_RUNS = 3
#: Between the write and its COMMIT, for a kill to fall there, too.
_BEFORE_COMMIT_S = 0.06

_gap: list[int] = []


@task_prerun.connect
def _begin(**_: Any) -> None:
    _busy_file().parent.mkdir(exist_ok=True)
    _busy_file().touch()


@task_postrun.connect
def _end(**_: Any) -> None:
    _busy_file().unlink(missing_ok=True)


def _busy_file() -> Path:
    return settings.DEMO_DIRECTORY / BUSY / str(os.getpid())


def _note(outcome: str, event: signals.Event, **_: Any) -> None:
    # One write of short lines: processes do not mix them, and one that is killed leaves whole ones or none.
    with (settings.DEMO_DIRECTORY / OUTCOMES).open("a") as log:
        log.write(f"{outcome}\n" * (event.count if outcome == "swept" else 1))


for _outcome in ("replayed", "conflicted", "interrupted", "swept"):
    getattr(signals, _outcome).connect(functools.partial(_note, _outcome), weak=False)


@receiver(about_to_write)
def _work(run: Run, **_: Any) -> None:
    time.sleep(_seconds_of(run))
    if run.kind == Kind.IDEMPOTENT and not django_settings.WEBHOOKS_ATOMIC:
        _gap.append(os.open(settings.DEMO_DIRECTORY / GAP, os.O_RDWR | os.O_CREAT))
        fcntl.flock(_gap[-1], fcntl.LOCK_SH)


@signals.settled.connect
@task_postrun.connect
def _leave_gap(**_: Any) -> None:
    while _gap:
        os.close(_gap.pop())


@receiver(written)
def _linger(**_: Any) -> None:
    if django_settings.WEBHOOKS_ATOMIC:
        time.sleep(random.uniform(0, _BEFORE_COMMIT_S))


def _seconds_of(run: Run) -> float:
    seconds = _plan().get(str(run.delivery_id), 0.0)
    if seconds <= QUICK_S:
        return seconds
    runs = Run.objects.filter(kind=run.kind, delivery_id=run.delivery_id, pk__lt=run.pk).count()
    return seconds if runs < _SLOW_RUNS else QUICK_S


@functools.cache
def _plan() -> dict[str, float]:
    plan: dict[str, float] = json.loads((settings.DEMO_DIRECTORY / PLAN).read_text())
    return plan
