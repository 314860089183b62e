"""Worker time of an empty task: from one start to the next, ``IdempotentTask`` against ``celery.Task``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext

from benchmarks.figures import Figure, compared
from benchmarks.publish import BASELINES
from benchmarks.session import BenchmarkError, Server, Session
from benchmarks.stamps import Stamp, cpu_per_task, wall_per_task
from benchmarks.workers import Plan, drain

#: What is measured: by the name of its task a label, its baseline, and what we want.
CANDIDATES: dict[str, tuple[str, str, float | None]] = {
    "again": ("duplicate, which gets the stored result", "plain", None),
    "by_task_id": ("IdempotentTask", "plain", 1.0),
    "by_argument": ("IdempotentTask, key of an argument", "plain", 1.0),
    "portable": ("the same, result stored apart", "plain", 1.15),
    "plain_late": ("celery.Task, acks_late", "plain", None),
    "by_argument_ignore": ("the same, ignore_result", "plain_ignore", 1.35),
    "trips_ignore": ("celery.Task with two trips, ignore_result", "plain_ignore", None),
}


def run(session: Session) -> Iterator[Figure]:
    """Drain one queue with one worker, blocks of all tasks interleaved."""
    # First comes the one that has to run once before the measured rounds replay it.
    main = dict(list(CANDIDATES.items())[:5])
    few = session.choose(quick=5, full=24)
    yield from measure(session, "solo", CANDIDATES, 50, session.choose(quick=16, full=60))
    if not session.quick:
        yield from measure(session, "prefork -c 1", main, 50, 60)
    yield from measure(session, "prefork -c 2", main, 200, few)
    yield from measure(session, "gevent -c 20", main, 200, few)


def measure(
    session: Session,
    pool: str,
    candidates: Mapping[str, tuple[str, str, float | None]],
    block: int,
    rounds: int,
    *,
    peers: Server | None = None,
) -> Iterator[Figure]:
    """Drain one queue of all, and of their baselines; on the server of ``peers``: with tasks of other libraries."""
    tasks = [*candidates, *sorted({baseline for _, baseline, _ in candidates.values()})]
    plan = Plan.interleaved(tasks, rounds=rounds, size=block, order=session.random)
    session.steps(plan.messages, f"worker, {pool}")
    own = session.server() if peers is None else nullcontext(peers)
    with own as server, session.directory() as directory:
        pools = f"-P {pool}".split()
        stamps = drain(plan, server, directory, *pools, step=session.step, peers=bool(peers))
        blocks = plan.measured(stamps)
    _check(blocks)
    wall, cpu = (
        {task: [clock(block) for block in found] for task, found in blocks.items()}
        for clock in (wall_per_task, cpu_per_task)
    )
    for name, (label, baseline, goal) in candidates.items():
        against = (baseline, BASELINES[baseline])
        yield compared("worker", f"{label} ({pool})", wall, cpu, name, against, goal)


def _check(blocks: Mapping[str, Sequence[Sequence[Stamp]]]) -> None:
    """Make sure that all ran, and duplicates did not: else the figures are of something else."""
    for task, measured in blocks.items():
        wrong = sum(bool(stamp.runs) is (task == "again") for block in measured for stamp in block)
        if wrong:
            expected = "ran" if task == "again" else "did not run"
            raise BenchmarkError(
                f"{wrong} messages of {task} {expected}: the figures would mislead"
            )
