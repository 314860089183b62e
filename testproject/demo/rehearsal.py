"""What the demo adds to a task in the worker: work that takes time, and a note of each step."""

from __future__ import annotations

import functools
import json
import os
import random
import time
from typing import TYPE_CHECKING, Any

from celery.signals import task_postrun, task_prerun, worker_process_init
from django.conf import settings as django_settings

from celery_idempotent.signals import Event, claimed, settled
from testproject import counters
from testproject.demo import settings, whereabouts
from testproject.demo.whereabouts import Step, Where
from testproject.webhooks.models import Kind, Run
from testproject.webhooks.tasks import (
    about_to_write,
    record_delivery,
    record_delivery_plain,
    written,
)

if TYPE_CHECKING:
    from celery import Task

__all__ = ["PLAN", "QUICK_S", "connect"]

#: The file, in the demo's directory, of the seconds that each delivery takes.
PLAN = "plan.json"

#: Whatever was slow at first is quick from its fourth run on: a task that always takes longer than
#: the visibility timeout is redelivered for ever, with Celery's own Task.
QUICK_S = 0.02
_SLOW_RUNS = 3
#: Between the write and what makes it last, for a kill to fall there, too.
_AFTERWARDS_S = 0.06

_KINDS = {
    record_delivery.name: Kind.IDEMPOTENT.value,
    record_delivery_plain.name: Kind.PLAIN.value,
}


def connect() -> None:
    worker_process_init.connect(_idle)
    task_prerun.connect(_begun)
    claimed.connect(_claimed)
    about_to_write.connect(_work)
    written.connect(_written)
    settled.connect(_settled)
    task_postrun.connect(_idle)
    counters.connect(settings.OUTCOME_LOG)


def _note(step: Step, kind: str = "", delivery_id: str = "") -> None:
    where = Where(
        pid=os.getpid(), parent=os.getppid(), step=step, kind=kind, delivery_id=delivery_id
    )
    whereabouts.note(settings.DEMO_DIRECTORY, where)


def _idle(**_: Any) -> None:
    _note(Step.IDLE)


def _begun(task: Task[Any, Any], args: Any, **_: Any) -> None:
    kind = _KINDS.get(task.name, "")
    _note(Step.BEGUN, kind, args[0] if kind else "")


def _claimed(event: Event, **_: Any) -> None:
    _note_event(Step.CLAIMED, event)


def _settled(event: Event, **_: Any) -> None:
    _note_event(Step.SETTLED, event)


def _note_event(step: Step, event: Event) -> None:
    kind = _KINDS.get(event.task)
    if kind is not None and event.identity is not None:
        _note(step, kind, event.identity.key)


def _work(run: Run, **_: Any) -> None:
    _note(Step.WORKING, run.kind, str(run.delivery_id))
    time.sleep(_seconds_of(run))
    _note(Step.WRITING, run.kind, str(run.delivery_id))


def _written(run: Run, **_: Any) -> None:
    _note(Step.WRITTEN, run.kind, str(run.delivery_id))
    # From Redis, and no process is killed here: chaos.py.
    if django_settings.WEBHOOKS_ATOMIC:
        time.sleep(random.uniform(0, _AFTERWARDS_S))


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
