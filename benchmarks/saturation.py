"""What a server does in a second of its processor for many clients at once, by verbs alone: so a user can size it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import redis

from benchmarks.figures import Figure, Spread, percentile
from benchmarks.operations import KEEP_MS, LEASE_MS, RESULT, claim, identity, settle
from benchmarks.session import Server, Session
from celery_idempotent.stores.redis.store import RedisStore

_CLIENTS, _CALLS, _SLOTS = 16, 1_000, 16_384


def run(session: Session) -> Iterator[Figure]:
    """Do the verbs from many threads at each kind of server, and what a lock and a result take at least."""
    rounds = session.choose(quick=3, full=15)
    binaries = dict.fromkeys(str(Server(prefer_path=each).binary) for each in (True, False))
    places = [*((binary, 1) for binary in binaries), (next(iter(binaries)), 3)]
    session.steps(rounds * len(places), "verbs of many clients")
    for binary, count in places:
        rates: dict[str, list[float]] = {}
        late: dict[str, list[float]] = {}
        with ExitStack() as stack:
            nodes, store, client = _open(stack, binary, count)
            threads = stack.enter_context(ThreadPoolExecutor(_CLIENTS))
            for number in range(rounds + 1):
                for name, rate, p99 in _round(threads, nodes, store, client, number):
                    if number:  # the first connects
                        rates.setdefault(name, []).append(rate)
                        late.setdefault(name, []).append(p99 * 1000)
                session.step(number > 0)
        where = Path(binary).name + ", a Cluster of three" * (count > 1)
        for name, found in rates.items():
            yield Figure(
                benchmark="server",
                what=f"{name} ({where})",
                unit="/s",
                value=Spread.of(found),
                extra={"p99_ms": Spread.of(late[name]).median},
            )


def _round(
    threads: ThreadPoolExecutor,
    nodes: Sequence[Any],
    store: RedisStore,
    client: Any,
    number: int,
) -> Iterator[tuple[str, float, float]]:
    """Do each with the same keys; yield its name, how often a processor does it in a second, and the p99."""
    keys: list[Any] = [identity(number * _CALLS + n) for n in range(_CALLS)]

    def lock(key: object) -> None:
        client.set(f"{key} lock", RESULT.body, nx=True, px=LEASE_MS)

    def keep(key: object) -> None:
        client.setex(f"{key} result", KEEP_MS // 1000, RESULT.body)

    calls = {"SET NX": lock, "SETEX": keep, "claim": partial(claim, store)}
    for name, call in {**calls, "settle": partial(settle, store)}.items():
        before = _processors_s(nodes)
        answers, took = zip(*threads.map(_timed, [call] * len(keys), keys), strict=True)
        each_s = (_processors_s(nodes) - before) / len(nodes)
        yield name, len(took) / each_s, percentile(took, 99)
        if name == "claim":
            keys = list(answers)  # its settles are of these records


def _open(stack: ExitStack, binary: str, count: int) -> tuple[list[Any], RedisStore, Any]:
    servers, nodes, buses = list[Server](), list[Any](), list[int]()
    for number in range(count):
        with socket.create_server(("127.0.0.1", 0)) as free:
            buses.append(free.getsockname()[1])
        cluster = {"cluster-enabled": "yes", "cluster-port": f"{buses[-1]}"} if count > 1 else {}
        servers.append(server := Server(options=cluster))
        server.binary = Path(binary)
        stack.enter_context(server)
        node: Any = redis.Redis(port=server.port)
        nodes.append(node)
        if cluster:
            first, after = (_SLOTS * n // count for n in (number, number + 1))
            node.execute_command("CLUSTER ADDSLOTSRANGE", first, after - 1)
            node.execute_command("CLUSTER MEET", "127.0.0.1", servers[0].port, buses[0])
    url = servers[0].url()
    if count == 1:
        return nodes, RedisStore(url), redis.Redis.from_url(url)
    while any(node.cluster("INFO")["cluster_state"] != "ok" for node in nodes):
        time.sleep(0.1)
    store = RedisStore(url.replace("redis://", "redis+cluster://"))
    return nodes, store, redis.RedisCluster.from_url(url)


def _timed(call: Callable[[Any], Any], subject: Any) -> tuple[Any, float]:
    before = time.perf_counter()
    return call(subject), time.perf_counter() - before


def _processors_s(nodes: Sequence[Any]) -> float:
    used = [node.info("cpu") for node in nodes]
    return float(sum(each["used_cpu_user"] + each["used_cpu_sys"] for each in used))
