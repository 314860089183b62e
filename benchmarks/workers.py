"""Fills a queue with numbered messages and has one real worker drain it."""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from celery.result import denied_join_result

from benchmarks.session import ROOT, BenchmarkError, Launched, Server, children_environment
from benchmarks.stamps import Stamp, Stamps
from benchmarks.tasks import make_app

#: How many keys the task "again" has.
REPLAYED = 20

#: A worker that starts no message for so long is stuck.
_PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True)
class Plan:
    """Which messages go into the queue, in which order: blocks of one task each."""

    blocks: Sequence[tuple[str, range]]

    @classmethod
    def interleaved(
        cls, tasks: Sequence[str], *, rounds: int, size: int, order: random.Random
    ) -> Plan:
        """In each round one block of each task, in an order of its own; the very first round warms up."""
        blocks: list[tuple[str, range]] = []
        for number in range(rounds + 1):
            shuffled = list(tasks)
            if number:
                order.shuffle(shuffled)
            for task in shuffled:
                start = len(blocks) * size
                blocks.append((task, range(start, start + size)))
        return cls(blocks)

    @property
    def messages(self) -> int:
        return sum(len(numbers) for _, numbers in self.blocks)

    def measured(self, stamps: Stamps) -> Mapping[str, list[list[Stamp]]]:
        """Return the blocks of each task in the order of the rounds, without the round that warmed up."""
        found: dict[str, list[list[Stamp]]] = {}
        for task, numbers in self.blocks:
            found.setdefault(task, []).append(stamps.read(numbers))
        return {task: blocks[1:] for task, blocks in found.items()}


def drain(
    plan: Plan,
    server: Server,
    directory: Path,
    *pool: str,
    step: Callable[[float], None] = lambda _: None,
    under: Sequence[str] = (),
    peers: bool = False,
    subscribes: bool = False,
) -> Stamps:
    """Publish what is planned, then let one worker run all of it, until all were started.

    ``under`` is a program that runs the worker; the publisher ``subscribes`` to each result, as it does by default.
    """
    path = directory / "stamps"
    stamps = Stamps(path, plan.messages)
    app = make_app(broker=server.url(0), backend=server.url(1), peers=peers)
    # Results are not waited for: to subscribe to each one would count in a time.
    with nullcontext() if subscribes else denied_join_result():
        _publish(plan, app, step)
    app.close()
    environment = children_environment(
        BENCH_BROKER=server.url(0),
        BENCH_BACKEND=server.url(1),
        BENCH_STAMPS=path,
        BENCH_PEERS="1" if peers else "",
        PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    )
    command = [*under, sys.executable, "-m", "celery", "-A", "benchmarks.worker_child", "worker"]
    command += [*pool, "--queues=bench", "--loglevel=WARNING"]
    command += ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    log = directory / "worker.log"
    with log.open("wb") as output:
        worker = Launched(command, directory=directory, log=output, env=environment)
    try:
        _wait(worker, stamps, plan.messages, log, step)
    finally:
        worker.stop(30)
    return stamps


def _publish(plan: Plan, app: Any, step: Callable[[float], None]) -> None:
    with app.producer_pool.acquire(block=True) as producer:
        for task, numbers in plan.blocks:
            for place, number in enumerate(numbers):
                args: tuple[int, ...] = (number,)
                if task == "again":
                    args = (number, place % REPLAYED)
                app.tasks[task].apply_async(args, producer=producer)
            step(len(numbers) / 2)


def _wait(
    worker: Launched,
    stamps: Stamps,
    messages: int,
    log: Path,
    step: Callable[[float], None],
) -> None:
    started, last = 0, time.monotonic()
    while started < messages:
        time.sleep(0.2)
        before, started = started, stamps.started()
        step((started - before) / 2)
        if started > before:
            last = time.monotonic()
        elif worker.exit_code() is not None or time.monotonic() - last > _PATIENCE_S:
            raise BenchmarkError(
                f"the worker stopped at message {started} of {messages}:\n{log.read_text()[-3000:]}"
            )
    time.sleep(0.2)  # the last one has started: let it end
