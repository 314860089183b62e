"""Bytes of Redis memory per record: the growth of ``used_memory``, over the number of records."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis

from benchmarks.figures import Figure, Spread
from benchmarks.operations import FINGERPRINT, RESULT, claim, settle
from benchmarks.session import BenchmarkError, Session, describe
from celery_idempotent.records import Identity, Stored
from celery_idempotent.stores.redis.store import RedisStore

__all__ = ["run"]

GOAL = 310.0
_BATCH = 1000
_DAY_MS = 24 * 3_600_000


@dataclass(frozen=True, slots=True)
class Naming:
    """How long the keys are."""

    label: str
    namespace: str
    digits: int

    def identity(self, number: int) -> Identity:
        return Identity(namespace=self.namespace, key=f"n{number:0{self.digits - 1}}")


#: The whole name in Redis has 40 bytes: "idem:{123}:t::" and the key.
_SHORT = Naming("40-byte name in Redis", "t", 26)
_LONG = Naming("40-byte key of task shop.tasks.charge", "shop.tasks.charge", 40)


def run(session: Session) -> Iterator[Figure]:
    """Fill servers of their own: with our records, and with those of other designs."""
    # The same load of the server's hash table (0.76) in both cases: its slots are part of the bill.
    count = session.choose(quick=25_000, full=100_000)
    ours = ((_LONG, RESULT, GOAL), (_SHORT, RESULT, None), (_SHORT, None, None))
    yield from _fill(session, count, ours, valkey=False)
    try:
        yield from _fill(session, count, ours[:2], valkey=True)
    except BenchmarkError:
        return  # no Valkey here


def _fill(
    session: Session,
    count: int,
    ours: tuple[tuple[Naming, Stored | None, float | None], ...],
    *,
    valkey: bool,
) -> Iterator[Figure]:
    for naming, value, goal in ours:
        yield from _records(session, count, naming, value, goal, valkey=valkey)
    for what, write in (("hash with the same fields", _hash), ("bare lock, SET PX", _lock)):
        session.steps(count, f"memory, {what}")
        with session.server(valkey=valkey) as server, redis.Redis(port=server.port) as client:
            engine = describe(client)
            before = _used(client)
            for start in range(0, count, _BATCH):
                pipe = client.pipeline(transaction=False)
                for number in range(start, start + _BATCH):
                    write(pipe, f"{number:040}")
                pipe.execute()
                session.step(_BATCH)
            yield _figure(f"{what}, 40-byte name", engine, (_used(client) - before) / count)


def _records(
    session: Session,
    count: int,
    naming: Naming,
    value: Stored | None,
    goal: float | None,
    *,
    valkey: bool,
) -> Iterator[Figure]:
    result = "100-byte result" if value else "no result kept"
    session.steps(2 * count, f"memory, {naming.label}, {result}")
    with session.server(valkey=valkey) as server, redis.Redis(port=server.port) as client:
        engine = describe(client)
        store = RedisStore(server.url())
        # The scripts and the connection are there before we count.
        store.forget(claim(store, Identity(namespace="t", key="first")).identity)
        settle(store, claim(store, Identity(namespace="t", key="first")))
        before = _used(client)
        records = []
        for number in range(count):
            records.append(claim(store, naming.identity(number)))
            session.step()
        processing = (_used(client) - before) / count
        for record in records:
            settle(store, record, value)
            session.step()
        completed = (_used(client) - before) / count
        store.close()
    yield _figure(f"COMPLETED, {naming.label}, {result}", engine, completed, goal)
    if value is not None:
        yield _figure(f"PROCESSING, {naming.label}", engine, processing)


def _figure(what: str, engine: str, amount: float, goal: float | None = None) -> Figure:
    spread = Spread.exactly(amount)
    return Figure(benchmark="memory", what=what, unit="B", value=spread, against=engine, goal=goal)


def _used(client: redis.Redis) -> int:
    info: Any = client.info("memory")
    return int(info["used_memory"])


def _hash(pipe: Any, name: str) -> None:
    fields = {
        "state": "COMPLETED",
        "token": 1_700_000_000_000_000,
        "task": str(uuid.uuid4()),
        "fp": FINGERPRINT,
        "created": 1_700_000_000_000,
        "updated": 1_700_000_000_000,
        "result": os.urandom(50).hex(),
    }
    pipe.hset(name, mapping=fields)
    pipe.pexpire(name, _DAY_MS)


def _lock(pipe: Any, name: str) -> None:
    pipe.set(name, str(uuid.uuid4()), px=_DAY_MS)
