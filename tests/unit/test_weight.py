"""A guard against getting slower: how many functions one task has us call. Unlike a time, it is always the same.

What the calls cost is measured by ``make bench ARGS=instructions``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from celery import Celery

import celery_idempotent
from celery_idempotent import IdempotentTask
from celery_idempotent.testing.delivery import message_of, run

PACKAGE = str(Path(celery_idempotent.__file__).parent)

#: So many calls each may take; a little more than they take on any Python that we support. Lower them when you can.
CEILINGS = {
    "a run": 320,
    "a run with a key": 330,
    "a run that keeps no result": 315,
    "a duplicate": 240,
    "a publish": 47,
    "a publish with a key": 107,
}


@pytest.fixture
def app(redis_url: str, prefix: str) -> Celery[Any]:
    app = Celery("weight", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = f"{redis_url}?prefix={prefix}"
    return app


@pytest.mark.parametrize("case", CEILINGS)
def test_a_task_takes_no_more_calls_than_before(app: Celery[Any], case: str) -> None:
    options: dict[str, Any] = {"idempotency_key": "n"} if "key" in case or "dup" in case else {}
    define: Any = app.task

    @define(name="weight", base=IdempotentTask, ignore_result="no result" in case, **options)
    def task(n: int) -> int:
        return n

    def once(n: int) -> Callable[[], object]:
        if "publish" in case:
            return lambda: message_of(task, (n,), {})
        if "duplicate" in case:
            run(task, message_of(task, (n,), {}))
        message = message_of(task, (n,), {})
        return lambda: run(task, message)

    for warm in range(3):
        once(warm)()
    # Now and then a collection of garbage, or the heartbeat of an earlier test, has one or two in between.
    count = min(_calls(once(n)) for n in range(3, 8))
    assert 0.7 * CEILINGS[case] < count <= CEILINGS[case]


def _calls(function: Callable[[], object]) -> int:
    """Return how many functions of ours it calls, and how many others they call."""
    count = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal count
        place = frame.f_code.co_filename
        ours = place.startswith(PACKAGE) and not place.startswith(f"{PACKAGE}/testing")
        count += ours and event in ("call", "c_call")

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count
