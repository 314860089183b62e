"""The libraries that are here and ours: on one worker, and from one publisher."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping

import redis

from benchmarks.figures import Figure, Spread, ratios
from benchmarks.libraries import PEERS, installed
from benchmarks.session import Server, Session
from benchmarks.stamps import cpu_per_task, wall_per_task
from benchmarks.tasks import make_app
from benchmarks.workers import Plan, drain

__all__ = ["run"]

_BLOCK = 50
_OURS = "by_argument"


def run(session: Session) -> Iterator[Figure]:
    """Publish blocks of all in shuffled order, then drain one queue of all with one worker."""
    names = {_OURS: "IdempotentTask, key of an argument"}
    names |= {name: peer.label for name, peer in installed().items()}
    for name, peer in PEERS.items():
        if name not in names:
            session.say(f"{peer.package} is not installed: left out (pip install --group bench)")
    # One server for both: celery-once has one client a process, for whichever app came first.
    with session.server() as server:
        yield from _published(session, server, names)
        redis.Redis(port=server.port).flushall()
        yield from _drained(session, server, names)


def _published(session: Session, server: Server, names: Mapping[str, str]) -> Iterator[Figure]:
    rounds = session.choose(quick=10, full=60)
    session.steps(rounds, "peers, publishing")
    wall: dict[str, list[float]] = {name: [] for name in ("plain", *names)}
    cpu: dict[str, list[float]] = {name: [] for name in wall}
    app = make_app(broker=server.url(0), backend=server.url(1), peers=True)
    number = 0
    for turn in range(-1, rounds):  # the first one warms up
        for name in session.random.sample(sorted(wall), len(wall)):
            publish = app.tasks[name].apply_async
            wall_before, cpu_before = time.perf_counter(), time.process_time()
            for _ in range(_BLOCK):
                number += 1
                publish((number,))
            cpu_after, wall_after = time.process_time(), time.perf_counter()
            if turn >= 0:
                wall[name].append((wall_after - wall_before) / _BLOCK * 1e6)
                cpu[name].append((cpu_after - cpu_before) / _BLOCK * 1e6)
        session.step()
    app.close()
    for name, label in names.items():
        yield _figure(f"publish: {label}", wall, cpu, name)


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
        yield _figure(f"worker: {label}", wall, cpu, name)


def _figure(
    what: str, wall: Mapping[str, list[float]], cpu: Mapping[str, list[float]], name: str
) -> Figure:
    return Figure(
        benchmark="peers",
        what=what,
        unit="x",
        value=ratios(wall[name], wall["plain"]),
        against="celery.Task",
        extra={
            "us": Spread.of(wall[name]).median,
            "baseline_us": Spread.of(wall["plain"]).median,
            "cpu_ratio": ratios(cpu[name], cpu["plain"]).median,
        },
    )
