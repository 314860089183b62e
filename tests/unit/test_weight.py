"""A guard against getting slower: how many functions one task has us call. Unlike a time, it is always the same.

What the calls cost is measured by ``make bench ARGS=instructions``. That of a request is in tests/http/test_weight.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery import signals as celery_signals

from celery_idempotent import IdempotentTask, signals
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.support.programs import run
from tests.support.waiting import wait_for
from tests.support.weight import calls

#: So many calls each may take; a little more than they take on any Python that we support. Lower them when you can.
#: A settle packs the whole record, in three calls, which saves the server a fifth of its script.
CEILINGS = {
    "a run": 155,
    "a run with a key": 161,
    "a run that keeps no result": 150,
    "a duplicate": 130,
    "a publish": 21,
    "a publish with a key": 61,
}


@pytest.fixture
def app(redis_url: str, prefix: str) -> Celery[Any]:
    app = Celery("weight", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = f"{redis_url}?prefix={prefix}"
    return app


@pytest.mark.parametrize("case", CEILINGS)
def test_a_task_takes_no_more_calls_than_before(
    app: Celery[Any], case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Earlier tests may have installed metrics, or had us listen by a task with callbacks.
    for signal in (celery_signals.task_success, signals.claimed, signals.settled, signals.replayed):
        monkeypatch.setattr(signal, "receivers", [])
    options: dict[str, Any] = {"idempotency_key": "n"} if "key" in case or "dup" in case else {}
    define: Any = app.task

    @define(name="weight", base=IdempotentTask, ignore_result="no result" in case, **options)
    def task(n: int) -> int:
        return n

    def once(n: int) -> Callable[[], object]:
        if "publish" in case:
            return lambda: message_of(task, (n,), {})
        if "duplicate" in case:
            deliver_message(task, message_of(task, (n,), {}))
        message = message_of(task, (n,), {})
        return lambda: deliver_message(task, message)

    for warm in range(3):
        once(warm)()
    # While the heartbeat is busy, with a silent store of an earlier test maybe, each run rings for it.
    heartbeat._given_up.clear()
    wait_for(lambda: heartbeat._looks_at < math.inf or not heartbeat._started, 30)
    # Now and then a collection of garbage has one or two in between.
    count = min(calls(once(n)) for n in range(3, 8))
    assert 0.7 * CEILINGS[case] < count <= CEILINGS[case]


#: Binds a task; prints how many modules of ours that imports, and how many texts it compiles: each method that a
#: dataclass or a named tuple writes for itself takes a twentieth of a millisecond.
BOUND = """
import sys
import celery, celery.app.task, celery.app.trace, celery.backends.base, celery.canvas, celery.loaders.app, celery.result
texts = 0
def note(event, arguments):
    global texts
    texts += event == "exec" and arguments[0].co_filename == "<string>"
sys.addaudithook(note)
import celery_idempotent
app = celery.Celery("weight", broker="memory://", set_as_current=False)
def body(): pass
task = app.task(body, name="weight", base=celery_idempotent.IdempotentTask, shared=False)
app.finalize()
assert task.idempotency_policy
print(sum(name.startswith("celery_idempotent") for name in sys.modules), texts)
"""


def test_a_task_is_bound_with_no_more_modules_and_compiled_texts_than_before() -> None:
    modules, texts = map(int, run("-c", BOUND, cwd=Path("/")).stdout.split())
    assert modules <= 53
    # Plain dataclasses compile each of their methods.
    assert texts <= 180
