"""CPU time to import the library and to bind a task, beyond what Celery itself takes for that."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.figures import Figure, Spread
from benchmarks.session import Session

__all__ = ["run"]

GOAL_MS = 60.0


def run(session: Session) -> Iterator[Figure]:
    """Start a new process each time: one of each kind a round, in turn."""
    rounds = session.choose(quick=5, full=30)
    session.steps(rounds, "import")
    times: dict[str, list[float]] = {"celery": [], "celery_idempotent": []}
    full: dict[str, list[float]] = {kind: [] for kind in times}
    for number in range(-1, rounds):  # the first one warms up: it writes the bytecode
        for kind, samples in times.items():
            ((seconds, collecting),) = session.child("imports_child", kind)
            if number >= 0:
                samples.append(seconds * 1000)
                full[kind].append(collecting * 1000)
        session.step()
    yield Figure(
        benchmark="import",
        what="import celery_idempotent and a task, beyond celery.Task's",
        unit="ms",
        value=Spread.of(_added(times)),
        goal=GOAL_MS,
        extra={
            "of_it_full_GC_ms": Spread.of(_added(full)).median,
            "celery_ms": Spread.of(times["celery"]).median,
        },
    )


def _added(samples: Mapping[str, Sequence[float]]) -> list[float]:
    pairs = zip(samples["celery_idempotent"], samples["celery"], strict=True)
    return [ours - plain for ours, plain in pairs]
