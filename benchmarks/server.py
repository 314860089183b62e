"""What a task costs the server of broker, results and records, publish and ack included: instructions, exact."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from benchmarks.figures import Figure, Spread
from benchmarks.instructions import cachegrind, counted
from benchmarks.libraries import installed
from benchmarks.publish import BASELINES
from benchmarks.session import Server, Session
from benchmarks.workers import Plan, drain

#: By the name of its task: what it is, what it is compared with, and what it may take.
_TASKS: dict[str, tuple[str, str, float | None]] = {
    "by_task_id": ("IdempotentTask", "plain", 2.08),
    "by_argument": ("IdempotentTask, key of an argument", "plain", 2.08),
    "again": ("duplicate, which gets the stored result", "plain", None),
    "by_argument_ignore": ("IdempotentTask, ignore_result", "plain_ignore", None),
}


def run(session: Session) -> Iterator[Figure]:
    """Serve n tasks and then 2n by each server that is here, under cachegrind: the difference is that of n tasks."""
    tasks = _TASKS | {name: (peer.label, "plain", None) for name, peer in installed().items()}
    names, more = ["plain", "plain_ignore", *tasks], session.choose(quick=100, full=400)
    # One port for all, as celery-once has one client a process; what goes by the clock would count.
    server = Server(options={"hz": "1", "activerehashing": "no"})
    for binary in sorted({str(Server(prefer_path=each).binary) for each in (True, False)}):
        kind = Path(binary).name
        session.steps(2 * len(names), f"instructions of {kind}")
        counts = {}
        for name in names:
            few, all_ = (_served(session, server, binary, name, times * more) for times in (1, 2))
            counts[name] = (all_ - few) / more
        for name, (label, against, goal) in tasks.items():
            yield Figure(
                benchmark="server",
                what=f"{label} ({kind})",
                unit="x",
                value=Spread.of([counts[name] / counts[against]]),
                against=BASELINES[against],
                goal=goal,
                extra={"thousands": counts[name] / 1000, "baseline": counts[against] / 1000},
            )


def _served(session: Session, server: Server, binary: str, name: str, count: int) -> int:
    with session.directory() as directory:
        log, wrapper = directory / "cachegrind", directory / "server"
        wrapper.write_text(f'#!/bin/sh\nexec {" ".join(cachegrind(log))} {binary} "$@"\n')
        wrapper.chmod(0o700)
        server.binary = wrapper
        plan, pool = Plan([(name, range(count))]), "--pool=solo"
        with server:
            drain(plan, server, directory, pool, peers=True, subscribes=True)
        session.step()
        return counted(log)
