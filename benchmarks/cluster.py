"""A worker with eight processes on a Redis Cluster of three: how fast, how it is spread, and that each key ran once."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import redis

from benchmarks.figures import Figure, Spread
from benchmarks.saturation_child import main_thread_s
from benchmarks.session import BenchmarkError, Server, Session
from benchmarks.stamps import Stamps
from benchmarks.workers import Plan, drain

__all__ = ["run"]

_NODES = 3
_SLOTS = 16_384
_PROCESSES = 8
#: A cluster of its own agrees within a second or two.
_PATIENCE_S = 60


def run(session: Session) -> Iterator[Figure]:
    """Drain one queue in which every tenth key is twice, one message right after the other."""
    keys = session.choose(quick=2_000, full=10_000)
    plan = Plan([("twice", range(keys + keys // 10))])
    session.steps(plan.messages, "cluster")
    with _cluster(session) as nodes, session.server() as broker, session.directory() as directory:
        clients = [redis.Redis(port=node.port) for node in nodes]
        results = redis.Redis(port=broker.port, db=1)
        before = [sum(main_thread_s(client)) for client in clients]
        stamps = drain(
            plan,
            broker,
            directory,
            "--pool=prefork",
            f"--concurrency={_PROCESSES}",
            step=session.step,
            store="redis+cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes),
            done=lambda: results.dbsize() == plan.messages,
        )
        after = [sum(main_thread_s(client)) for client in clients]
        cpu = [now - was for now, was in zip(after, before, strict=True)]
        scripts = [_script_us(client) for client in clients]
        stored = [int(client.dbsize()) for client in clients]
        for client in (*clients, results):
            client.close()
    yield _rate(plan, stamps)
    for number, (took, ran, count) in enumerate(zip(cpu, scripts, stored, strict=True), start=1):
        yield Figure(
            benchmark="cluster",
            what=f"node {number}: of the CPU of all",
            unit="%",
            value=Spread.exactly(took / sum(cpu) * 100),
            extra={
                "in_scripts_%": ran / sum(scripts) * 100,
                "in_keys_%": count / sum(stored) * 100,
            },
        )


def _script_us(client: redis.Redis) -> float:
    """Return what all scripts took: without what an idle node does for its cluster."""
    stats: Any = client.info("commandstats")
    return float(stats["cmdstat_evalsha"]["usec"])


def _rate(plan: Plan, stamps: Stamps) -> Figure:
    """Count from outside what ran, and return how fast."""
    numbers = range(plan.messages)
    found = stamps.read(numbers)
    runs = Counter({plan.key_of(number): 0 for number in numbers})
    for number, stamp in zip(numbers, found, strict=True):
        runs[plan.key_of(number)] += stamp.runs
    wrong = {key: count for key, count in runs.items() if count != 1}
    if wrong:
        raise BenchmarkError(f"of {len(runs)} keys, these ran not once but: {wrong}")
    walls = [stamp.wall for stamp in found]
    return Figure(
        benchmark="cluster",
        what=f"messages, {_PROCESSES} processes",
        unit="/s",
        value=Spread.exactly((len(walls) - 1) / (max(walls) - min(walls)) * 1e9),
        extra={"keys": len(runs), "ran_once": len(runs) - len(wrong)},
    )


@contextlib.contextmanager
def _cluster(session: Session) -> Iterator[Sequence[Server]]:
    """Run a Cluster of three masters while the block lasts."""
    with contextlib.ExitStack() as stack:
        options = {"cluster-enabled": "yes"}
        nodes = [stack.enter_context(session.server(options=options)) for _ in range(_NODES)]
        clients = [stack.enter_context(redis.Redis(port=node.port)) for node in nodes]
        for n, client in enumerate(clients):
            slots = range(n * _SLOTS // _NODES, (n + 1) * _SLOTS // _NODES)
            client.execute_command("CLUSTER", "ADDSLOTS", *slots)
            client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", n + 1)
            client.execute_command("CLUSTER", "MEET", "127.0.0.1", nodes[0].port)
        end = time.monotonic() + _PATIENCE_S
        while not all(map(_agrees, clients)):
            if time.monotonic() > end:
                raise BenchmarkError("the nodes of the Redis Cluster do not find each other")
            time.sleep(0.1)
        yield nodes


def _agrees(client: redis.Redis) -> bool:
    ask: Any = client.execute_command
    told = ask("CLUSTER", "INFO").decode().split()
    return {f"cluster_known_nodes:{_NODES}", "cluster_state:ok"} <= set(told)
