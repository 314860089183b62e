"""CPU time to import the library and to bind a task, beyond what Celery itself takes for that."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.figures import Figure, Spread
from benchmarks.session import Session

__all__ = ["run"]

GOAL_MS = 60.0


def run(session: Session) -> Iterator[Figure]:
    """Start a new process each time: one of each kind a round, in turn."""
    rounds = session.choose(quick=5, full=30)
    session.steps(rounds, "import")
    times: dict[str, list[float]] = {"celery": [], "celery_idempotent": []}
    for number in range(-1, rounds):  # the first one warms up: it writes the bytecode
        for kind, samples in times.items():
            (seconds,) = session.child("imports_child", kind)
            if number >= 0:
                samples.append(seconds * 1000)
        session.step()
    pairs = zip(times["celery_idempotent"], times["celery"], strict=True)
    yield Figure(
        benchmark="import",
        what="import celery_idempotent and a task, beyond celery.Task's",
        unit="ms",
        value=Spread.of([ours - plain for ours, plain in pairs]),
        goal=GOAL_MS,
        extra={"celery_ms": Spread.of(times["celery"]).median},
    )
