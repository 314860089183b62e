"""Publish time: ``apply_async`` of ``IdempotentTask`` against ``celery.Task``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis

from benchmarks.figures import Figure, compared
from benchmarks.session import Session
from benchmarks.tasks import PAYLOAD, make_app

GOAL = 1.05
_BLOCK = 50

#: What is measured: its task, options of apply_async, and its baseline.
_CASES: dict[str, tuple[str, dict[str, str], str]] = {
    "IdempotentTask": ("by_task_id", {}, "plain"),
    "key of an argument": ("by_argument", {}, "plain"),
    "idempotency_key=... in the call": ("by_task_id", {"idempotency_key": "order-17"}, "plain"),
    "key of an argument, ignore_result": ("by_argument_ignore", {}, "plain_ignore"),
    "key of an argument, 1 kB of arguments": ("by_webhook", {}, "plain_webhook"),
}
BASELINES = {
    "plain": "celery.Task",
    "plain_ignore": "celery.Task, ignore_result",
    "plain_webhook": "celery.Task, 1 kB of arguments",
}


def run(session: Session) -> Iterator[Figure]:
    """Publish blocks of all cases in shuffled order, from one thread over one connection."""
    rounds = session.choose(quick=25, full=150)
    cases = {what: (task, options) for what, (task, options, _) in _CASES.items()}
    cases |= {name: (name, {}) for name in BASELINES}
    session.steps(rounds, "publish")
    with session.server() as server, redis.Redis(port=server.port) as client:
        app = make_app(broker=server.url(0), backend=server.url(1))
        calls = {what: _call(app.tasks[task], options) for what, (task, options) in cases.items()}
        wall, cpu = time_blocks(session, calls, rounds, after=lambda: client.delete("bench"))
        app.close()
    for what, (_, _, against) in _CASES.items():
        yield compared("publish", what, wall, cpu, what, (against, BASELINES[against]), GOAL)


def _call(task: Any, options: dict[str, str]) -> Callable[[int], object]:
    more = (PAYLOAD,) if task.name.endswith("webhook") else ()
    return lambda number: task.apply_async((number, *more), **options)


def time_blocks(
    session: Session,
    calls: Mapping[str, Callable[[int], object]],
    rounds: int,
    *,
    after: Callable[[], object] = lambda: None,
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return what a call took by the clock and of the CPU, in microseconds: blocks of each in shuffled order."""
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    number = 0
    for turn in range(-1, rounds):  # the first one warms up
        for name in session.random.sample(sorted(calls), len(calls)):
            call = calls[name]
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            for _ in range(_BLOCK):
                number += 1
                call(number)
            cpu_after, wall_after = time.process_time(), time.perf_counter()
            if turn >= 0:
                wall[name].append((wall_after - wall_before) / _BLOCK * 1e6)
                cpu[name].append((cpu_after - cpu_before) / _BLOCK * 1e6)
        after()
        session.step()
    return wall, cpu
