"""Worker time of an empty task: from one start to the next, ``IdempotentTask`` against ``celery.Task``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from benchmarks.figures import Figure, Spread, ratios
from benchmarks.session import BenchmarkError, Session
from benchmarks.stamps import Stamp, cpu_per_task, typical_wall, wall_per_task
from benchmarks.workers import Plan, drain

__all__ = ["run"]

#: The result is stored with the record, or apart from it, or not at all.
GOAL, PORTABLE_GOAL, IGNORED_GOAL = 1.0, 1.15, 1.2


@dataclass(frozen=True, slots=True)
class Candidate:
    """A task, what it is compared with, and what we want of it."""

    task: str
    label: str
    against: str = "plain"
    goal: float | None = None


_REPLAY = Candidate("again", "duplicate, which gets the stored result")
_BY_TASK_ID = Candidate("by_task_id", "IdempotentTask", goal=GOAL)
_BY_ARGUMENT = Candidate("by_argument", "IdempotentTask, key of an argument", goal=GOAL)
_PORTABLE = Candidate("portable", "the same, result stored apart", goal=PORTABLE_GOAL)
_IGNORED = Candidate(
    "by_argument_ignore", "the same, ignore_result", against="plain_ignore", goal=IGNORED_GOAL
)
_LATE = Candidate("plain_late", "celery.Task, acks_late")
_FLOOR = Candidate("floor", "celery.Task and two bare round trips")
_BASELINES = {"plain": "celery.Task", "plain_ignore": "celery.Task, ignore_result"}


@dataclass(frozen=True, slots=True)
class Pool:
    """A worker, and how much it is given to do."""

    label: str
    options: Sequence[str]
    candidates: Sequence[Candidate]
    block: int
    rounds: int
    #: Does one task start when the last one is over?
    in_turn: bool = False


def run(session: Session) -> Iterator[Figure]:
    """Drain one queue with one worker, blocks of all tasks interleaved."""
    everything = (_BY_TASK_ID, _BY_ARGUMENT, _PORTABLE, _IGNORED, _REPLAY, _LATE, _FLOOR)
    main = (_BY_TASK_ID, _BY_ARGUMENT, _PORTABLE, _REPLAY)
    pools = [
        Pool(
            "solo", ["--pool=solo"], everything, 50, session.choose(quick=16, full=60), in_turn=True
        ),
        Pool(
            "prefork -c 2",
            ["--pool=prefork", "--concurrency=2"],
            main,
            200,
            session.choose(quick=5, full=24),
        ),
        Pool(
            "gevent -c 20",
            ["--pool=gevent", "--concurrency=20"],
            main,
            200,
            session.choose(quick=5, full=24),
        ),
    ]
    if not session.quick:
        pools.insert(
            1,
            Pool("prefork -c 1", ["--pool=prefork", "--concurrency=1"], main, 50, 60, in_turn=True),
        )
    for pool in pools:
        yield from _measure(session, pool)


def _measure(session: Session, pool: Pool) -> Iterator[Figure]:
    # First come those that have to run once before the measured rounds replay them.
    tasks = [
        candidate.task for candidate in sorted(pool.candidates, key=lambda c: c is not _REPLAY)
    ]
    tasks += sorted({candidate.against for candidate in pool.candidates})
    plan = Plan.interleaved(tasks, rounds=pool.rounds, size=pool.block, order=session.random)
    session.steps(plan.messages, f"worker, {pool.label}")
    with session.server() as server, session.directory() as directory:
        blocks = plan.measured(drain(plan, server, directory, *pool.options, step=session.step))
    _check(blocks)
    for candidate in pool.candidates:
        yield _figure(candidate, pool, blocks)


def _figure(
    candidate: Candidate, pool: Pool, blocks: Mapping[str, Sequence[Sequence[Stamp]]]
) -> Figure:
    ours = [wall_per_task(block) for block in blocks[candidate.task]]
    theirs = [wall_per_task(block) for block in blocks[candidate.against]]
    cpu = [cpu_per_task(block) for block in blocks[candidate.task]]
    their_cpu = [cpu_per_task(block) for block in blocks[candidate.against]]
    extra = {
        "us": Spread.of(ours).median,
        "baseline_us": Spread.of(theirs).median,
        "cpu_ratio": ratios(cpu, their_cpu).median,
    }
    if pool.in_turn:
        typical = [typical_wall(block) for block in blocks[candidate.task]]
        their_typical = [typical_wall(block) for block in blocks[candidate.against]]
        extra["typical_ratio"] = ratios(typical, their_typical).median
    return Figure(
        benchmark="worker",
        what=f"{candidate.label} ({pool.label})",
        unit="x",
        value=ratios(ours, theirs),
        against=_BASELINES[candidate.against],
        goal=candidate.goal,
        extra=extra,
    )


def _check(blocks: Mapping[str, Sequence[Sequence[Stamp]]]) -> None:
    """Make sure that all ran, and duplicates did not: else the figures are of something else."""
    for task, measured in blocks.items():
        wrong = sum(stamp.ran is (task == "again") for block in measured for stamp in block)
        if wrong:
            expected = "ran" if task == "again" else "did not run"
            raise BenchmarkError(
                f"{wrong} messages of {task} {expected}: the figures would mislead"
            )
