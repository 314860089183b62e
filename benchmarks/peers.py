"""The libraries that are here and ours: on one worker, and from one publisher."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis

from benchmarks.figures import Figure, compared
from benchmarks.libraries import installed
from benchmarks.publish import time_blocks
from benchmarks.session import Server, Session
from benchmarks.stamps import cpu_per_task, wall_per_task
from benchmarks.tasks import make_app
from benchmarks.workers import Plan, drain

_BLOCK = 50
_OURS = "by_argument"


def run(session: Session) -> Iterator[Figure]:
    """Publish blocks of all in shuffled order, then drain one queue of all with one worker."""
    names = {_OURS: "IdempotentTask, key of an argument"}
    names |= {name: peer.label for name, peer in installed().items()}
    # One server for both: celery-once has one client a process, for whichever app came first.
    with session.server() as server:
        yield from _published(session, server, names)
        redis.Redis(port=server.port).flushall()
        yield from _drained(session, server, names)


def _published(session: Session, server: Server, names: Mapping[str, str]) -> Iterator[Figure]:
    rounds = session.choose(quick=10, full=60)
    session.steps(rounds, "peers, publishing")
    app = make_app(broker=server.url(0), backend=server.url(1), peers=True)

    def call(task: Any) -> Callable[[int], object]:
        return lambda number: task.apply_async((number,))

    calls = {name: call(app.tasks[name]) for name in ("plain", *names)}
    wall, cpu = time_blocks(session, calls, rounds)
    app.close()
    for name, label in names.items():
        yield compared("peers", f"publish: {label}", wall, cpu, name)


def _drained(session: Session, server: Server, names: Mapping[str, str]) -> Iterator[Figure]:
    rounds = session.choose(quick=12, full=60)
    plan = Plan.interleaved(["plain", *names], rounds=rounds, size=_BLOCK, order=session.random)
    session.steps(plan.messages, "peers, one worker")
    with session.directory() as directory:
        stamps = drain(plan, server, directory, "--pool=solo", step=session.step, peers=True)
        blocks = plan.measured(stamps)
    wall = {name: [wall_per_task(block) for block in found] for name, found in blocks.items()}
    cpu = {name: [cpu_per_task(block) for block in found] for name, found in blocks.items()}
    for name, label in names.items():
        yield compared("peers", f"worker: {label}", wall, cpu, name)
