"""Ten million keys against a hundred thousand: what is asked of a store should take as long."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import redis

from benchmarks import postgresql
from benchmarks.figures import Figure, Spread, ratios
from benchmarks.operations import claim, prepared_claim, settle
from benchmarks.scaling import NAMESPACE, Calls, key_of
from benchmarks.session import BenchmarkError, Server, Session
from celery_idempotent.records import Held, Identity
from celery_idempotent.stores.redis.keyspace import Keyspace
from celery_idempotent.stores.redis.store import RedisStore

__all__ = ["run"]

GOAL = 1.2
FEW = 100_000
_CHUNK = 5_000
_PAIRS = 5_000


def run(session: Session) -> Iterator[Figure]:
    """Ask both in turn: Redis, then PostgreSQL where there is one."""
    if session.keys <= FEW:
        raise BenchmarkError(f"scale compares with {FEW:,} keys: give --keys more")
    rounds = session.choose(quick=5, full=15)
    yield from _redis(session, rounds)
    if postgresql.available():
        yield from _postgresql(session, rounds)


def _redis(session: Session, rounds: int) -> Iterator[Figure]:
    with ExitStack() as stack:
        sizes = (FEW, session.keys)
        servers = [stack.enter_context(session.server()) for _ in sizes]
        stores = [RedisStore(server.url()) for server in servers]
        session.steps(sum(sizes), "scale, Redis, filling")
        for server, store, size in zip(servers, stores, sizes, strict=True):
            for written in fill(server, store, size):
                session.step(written)
        _rehash(servers, session.keys)
        session.steps(rounds, "scale, Redis")
        both = [Calls(*each, session.random) for each in zip(stores, sizes, strict=True)]
        times: list[list[dict[str, float]]] = [[], []]
        for number in range(-1, rounds):  # the first one warms up
            for n in session.random.sample((0, 1), 2):
                measured = both[n].time()
                if number >= 0:
                    times[n].append(measured)
            session.step()
        yield from compared("Redis", session.keys, *times)
        yield from _server_cpu(servers[1], stores[1])
        yield from _hot_key(servers[1], stores[1])
        for store in stores:
            store.close()


def compared(
    engine: str, keys: int, few: Sequence[dict[str, float]], many: Sequence[dict[str, float]]
) -> Iterator[Figure]:
    """Return the figures of two series of rounds."""
    for name in few[0]:
        one, other = ([each[name] for each in series] for series in (many, few))
        yield Figure(
            benchmark="scale",
            what=f"{engine}: {name}, among {keys:,}",
            unit="x",
            value=ratios(one, other),
            against=f"among {FEW:,}",
            goal=GOAL,
            extra={"us": Spread.of(one).median, "baseline_us": Spread.of(other).median},
        )


def fill(server: Server, store: RedisStore, count: int) -> Iterator[int]:
    """Write completed records by the thousand: copies of one that the verbs made, each under its own name."""
    settle(store, claim(store, Identity(namespace=NAMESPACE, key="first")))
    keys = Keyspace("idem")
    with redis.Redis(port=server.port) as client:
        record: Any = client.get(keys.locate(Identity(namespace=NAMESPACE, key="first"))[1])
    tail = b"$%d\r\n%b\r\n$2\r\nPX\r\n$8\r\n86400000\r\n" % (len(record), record)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        for start in range(0, count, _CHUNK):
            numbers = range(start, min(start + _CHUNK, count))
            names = [
                keys.locate(Identity(namespace=NAMESPACE, key=key_of(number)))[1]
                for number in numbers
            ]
            head = b"*5\r\n$3\r\nSET\r\n$%d\r\n%b\r\n"
            connection.sendall(b"".join([head % (len(name), name) + tail for name in names]))
            left = len(b"+OK\r\n") * len(names)
            while left:
                left -= len(connection.recv(left))
            yield len(names)


def _rehash(servers: Sequence[Server], keys: int) -> None:
    """Let the servers move their tables to larger ones: at their usual pace that takes two minutes for 10^7 keys."""
    clients = [redis.Redis(port=server.port) for server in servers]
    usual: Any = clients[0].config_get("hz")
    for client in clients:
        client.config_set("hz", 500)
    time.sleep(keys / 500_000)
    for client in clients:
        client.config_set("hz", usual["hz"])
        client.close()


def _server_cpu(server: Server, store: RedisStore) -> Iterator[Figure]:
    """Measure what a claim and a settle take of Redis' one thread: its inverse is where it is full."""
    with redis.Redis(port=server.port) as client:
        before = _cpu_s(client)
        for number in range(_PAIRS):
            settle(store, claim(store, Identity(namespace=NAMESPACE, key=f"cpu-{number}")))
        took = (_cpu_s(client) - before) / _PAIRS
    yield _one("Redis: its CPU per claim and settle", "us", took * 1e6)
    yield _one("Redis: claims and settles a second when its one thread is full", "", 1 / took)


def _cpu_s(client: redis.Redis) -> float:
    info: Any = client.info("cpu")
    return float(info["used_cpu_user"] + info["used_cpu_sys"])


def _hot_key(server: Server, store: RedisStore) -> Iterator[Figure]:
    """One key that 10,000 ask for: while it is held, and when it is done."""
    identity = Identity(namespace=NAMESPACE, key="hot")
    record = claim(store, identity)
    name = Keyspace("idem").locate(identity)[1]
    with redis.Redis(port=server.port) as client:
        size: Any = client.memory_usage(name)
        for what in ("while it runs", "with its result"):
            calls = [prepared_claim(store, identity) for _ in range(10_000)]
            cpu, before = _cpu_s(client), time.perf_counter()
            held = sum(isinstance(call(), Held) for call in calls)
            took, cpu = time.perf_counter() - before, _cpu_s(client) - cpu
            assert held == (10_000 if what == "while it runs" else 0)
            after: Any = client.memory_usage(name)
            yield _one(
                f"Redis: one of 10,000 duplicates of one key, {what}",
                "us",
                took * 100,
                server_cpu_us=cpu * 100,
                record_grew_bytes=after - size,
            )
            settle(store, record)
            size = client.memory_usage(name)


def _postgresql(session: Session, rounds: int) -> Iterator[Figure]:
    session.steps(rounds, "scale, PostgreSQL")
    times: list[list[dict[str, float]]] = [[], []]
    seed = session.random.randrange(10_000)
    for found in session.child("scale_child", FEW, session.keys, rounds, seed):
        if "few" in found:
            times[0].append(found["few"])
            times[1].append(found["many"])
            session.step()
        else:
            yield _one(f"PostgreSQL: {found['what']}", found["unit"], found["amount"])
    yield from compared("PostgreSQL", session.keys, *times)


def _one(what: str, unit: str, amount: float, **extra: float) -> Figure:
    return Figure(
        benchmark="scale", what=what, unit=unit, value=Spread.exactly(amount), extra=extra
    )
