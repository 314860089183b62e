"""User-space instructions, counted by valgrind's cachegrind: nearly the same in every run, whatever else goes on."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.figures import Figure, Spread
from benchmarks.publish import BASELINES
from benchmarks.session import ROOT, BenchmarkError, Server, Session, children_environment
from benchmarks.worker import CANDIDATES
from benchmarks.workers import REPLAYED, Plan, drain

_TASKS = tuple(
    (name, f"worker: {label}", baseline)
    for name, (label, baseline, _) in CANDIDATES.items()
    if name != "plain_late"
)
_PUBLISHED = (
    ("by_task_id", "publish: IdempotentTask", "plain"),
    ("by_argument", "publish: key of an argument", "plain"),
    ("by_webhook", "publish: the same, 1 kB of arguments", "plain_webhook"),
)
_VERBS = tuple(
    (verb, f"verb: {verb}", "bare EVALSHA")
    for verb in (
        *("claim", "settle", "settle with the task's result", "release", "renew"),
        "claim of a completed key (replay)",
    )
)
#: What each may take, as a ratio to its baseline: where the result is stored with the record, less than a plain task.
_GOALS = {
    ("worker", "by_task_id"): 0.95,
    ("worker", "by_argument"): 0.95,
    ("worker", "by_argument_ignore"): 1.05,
    ("worker", "again"): 0.95,
    ("publish", "by_task_id"): 1.01,
    ("publish", "by_argument"): 1.05,
    ("publish", "by_webhook"): 1.10,
}


def available() -> bool:
    """Is valgrind here?"""
    return shutil.which("valgrind") is not None


def run(session: Session) -> Iterator[Figure]:
    """Count each in two runs that differ in nothing but how often it is done."""
    more = session.choose(quick=50, full=200)
    parts = (("verb", _VERBS), ("publish", _PUBLISHED), ("worker", _TASKS))
    session.steps(sum(len(_names(rows)) for _, rows in parts) + 1, "instructions")
    for kind, rows in parts:
        names = _names(rows)
        if kind == "worker":
            counts = _worker(session, names, more)
        else:
            with session.server() as server, session.directory() as directory:
                counts = count(kind, names, more, server, directory)
            session.step(len(names))
        for name, label, against in rows:
            yield Figure(
                benchmark="instructions",
                what=label,
                unit="x",
                value=Spread.of([counts[name] / counts[against]]),
                against=BASELINES.get(against, against),
                goal=_GOALS.get((kind, name)),
                extra={
                    "added_thousands": (counts[name] - counts[against]) / 1000,
                    "thousands": counts[name] / 1000,
                    "baseline_thousands": counts[against] / 1000,
                },
            )


def _names(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    return sorted({name for name, _, _ in rows} | {against for _, _, against in rows})


def _worker(session: Session, names: Sequence[str], more: int) -> dict[str, float]:
    """Let a worker drain a few messages of every task, then again with more of one of them."""
    with session.server() as server, session.directory() as directory:
        # It writes the bytecode, if there is none: else the first that is counted would, and the others less.
        drain(Plan([(names[0], range(1))]), server, directory, "--pool=solo")
    base = _drained(session, names, None, more)
    session.step()
    counts = {}
    for name in names:
        counts[name] = (_drained(session, names, name, more) - base) / more
        session.step()
    return counts


def _drained(session: Session, names: Sequence[str], favoured: str | None, more: int) -> int:
    blocks, start = [], 0
    for name in names:
        end = start + REPLAYED + (more if name == favoured else 0)
        blocks.append((name, range(start, end)))
        start = end
    with session.server() as server, session.directory() as directory:
        log = directory / "cachegrind"
        drain(Plan(blocks), server, directory, "--pool=solo", under=cachegrind(log))
        return counted(log)


def count(
    kind: str, names: Sequence[str], more: int, server: Server, directory: Path
) -> dict[str, float]:
    """Count what each verb or publication takes, as the difference of two processes; empties the server."""
    environment = children_environment(PYTHONHASHSEED=0)

    def done(*numbers: int, under: Sequence[str] = ()) -> str:
        command = [*under, sys.executable, "-m", "benchmarks.instructions_child", kind]
        command += [*map(str, (server.port, *numbers)), *names]
        ended = subprocess.run(
            command, check=True, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
        )
        return ended.stdout

    done(1, 1)  # writes the bytecode, if there is none
    logs = directory / "cachegrind-%p"
    counts: dict[str, list[int]] = {}
    for line in done(20, more, under=cachegrind(logs)).splitlines():
        name, _, pid = json.loads(line)
        counts.setdefault(name, []).append(counted(logs.with_name(f"cachegrind-{pid}")))
    return {name: (all_ - few) / more for name, (few, all_) in counts.items()}


def cachegrind(log: Path) -> Sequence[str]:
    if not available():
        raise BenchmarkError("valgrind is not installed")
    options = ("--cache-sim=no", "--cachegrind-out-file=/dev/null", f"--log-file={log}")
    return ("valgrind", "--tool=cachegrind", *options)


def counted(log: Path) -> int:
    found = re.search(r"I\s+refs:\s+([\d,]+)", log.read_text())
    if not found:
        raise BenchmarkError(f"cachegrind counted nothing:\n{log.read_text()[-2000:]}")
    return int(found[1].replace(",", ""))
