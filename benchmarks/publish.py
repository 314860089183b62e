"""Publish time: ``apply_async`` of ``IdempotentTask`` against ``celery.Task``."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import redis

from benchmarks.figures import Figure, Spread, ratios
from benchmarks.session import Session
from benchmarks.tasks import PAYLOAD, make_app

__all__ = ["CASES", "run"]

GOAL = 1.05
_BLOCK = 50

#: Label, task, options of apply_async, whether it takes the webhook, and its baseline.
CASES: tuple[tuple[str, str, dict[str, Any], bool, str], ...] = (
    ("IdempotentTask", "by_task_id", {}, False, "plain"),
    ("key of an argument", "by_argument", {}, False, "plain"),
    (
        "idempotency_key=... in the call",
        "by_task_id",
        {"idempotency_key": "order-17"},
        False,
        "plain",
    ),
    ("key of an argument, ignore_result", "by_argument_ignore", {}, False, "plain_ignore"),
    ("key of an argument, 1 kB of arguments", "by_webhook", {}, True, "plain_webhook"),
)
_BASELINES = {
    "plain": ("celery.Task", False),
    "plain_ignore": ("celery.Task, ignore_result", False),
    "plain_webhook": ("celery.Task, 1 kB of arguments", True),
}


def run(session: Session) -> Iterator[Figure]:
    """Publish blocks of all cases in shuffled order, from one thread over one connection."""
    rounds = session.choose(quick=25, full=150)
    cases = {label: (task, options, big) for label, task, options, big, _ in CASES}
    cases |= {name: (name, {}, big) for name, (_, big) in _BASELINES.items()}
    wall: dict[str, list[float]] = {label: [] for label in cases}
    cpu: dict[str, list[float]] = {label: [] for label in cases}
    session.steps(rounds, "publish")
    with session.server() as server, redis.Redis(port=server.port) as client:
        app = make_app(broker=server.url(0), backend=server.url(1))
        for number in range(-1, rounds):  # the first one warms up
            for label in session.random.sample(sorted(cases), len(cases)):
                task, options, big = cases[label]
                args = (number, PAYLOAD) if big else (number,)
                publish = app.tasks[task].apply_async
                wall_before, cpu_before = time.perf_counter(), time.process_time()
                for _ in range(_BLOCK):
                    publish(args, **options)
                cpu_after, wall_after = time.process_time(), time.perf_counter()
                if number >= 0:
                    wall[label].append((wall_after - wall_before) / _BLOCK * 1e6)
                    cpu[label].append((cpu_after - cpu_before) / _BLOCK * 1e6)
            client.delete("bench")
            session.step()
        app.close()
    for label, _, _, _, against in CASES:
        yield Figure(
            benchmark="publish",
            what=label,
            unit="x",
            value=ratios(wall[label], wall[against]),
            against=_BASELINES[against][0],
            goal=GOAL,
            extra={
                "us": Spread.of(wall[label]).median,
                "baseline_us": Spread.of(wall[against]).median,
                "cpu_ratio": ratios(cpu[label], cpu[against]).median,
            },
        )
