"""What the demo adds to a task in the worker: work that takes time, and the gate before the write."""

from __future__ import annotations

import functools
import json
import time
from typing import Any

from celery.signals import task_postrun

from testproject import counters
from testproject.demo import settings
from testproject.demo.gate import Gate
from testproject.webhooks.models import Run
from testproject.webhooks.tasks import about_to_write

__all__ = ["GATE", "PLAN", "QUICK_S", "connect"]

#: The files, in the demo's directory, of the gate and of the seconds that each delivery takes.
GATE = "gate"
PLAN = "plan.json"

#: Whatever was slow at first is quick from its fourth run on: a task that always takes longer than
#: the visibility timeout is redelivered for ever, with Celery's own Task.
QUICK_S = 0.02
_SLOW_RUNS = 3


def connect() -> None:
    about_to_write.connect(_work_then_wait_at_the_gate)
    task_postrun.connect(_leave_the_gate)
    counters.connect(settings.OUTCOME_LOG)


def _work_then_wait_at_the_gate(run: Run, **_: Any) -> None:
    time.sleep(_seconds_of(run))
    _gate().enter()


def _leave_the_gate(**_: Any) -> None:
    _gate().leave()


def _seconds_of(run: Run) -> float:
    seconds = _plan().get(str(run.delivery_id), 0.0)
    if seconds <= QUICK_S:
        return seconds
    runs = Run.objects.filter(kind=run.kind, delivery_id=run.delivery_id, pk__lt=run.pk).count()
    return seconds if runs < _SLOW_RUNS else QUICK_S


@functools.cache
def _gate() -> Gate:
    return Gate(settings.DEMO_DIRECTORY / GATE)


@functools.cache
def _plan() -> dict[str, float]:
    plan: dict[str, float] = json.loads((settings.DEMO_DIRECTORY / PLAN).read_text())
    return plan
