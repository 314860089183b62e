"""The verbs of a store, each as calls that have been prepared and can be timed one by one."""

from __future__ import annotations

import functools
import itertools
import json
import os
import random
import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import redis

from celery_idempotent import records
from celery_idempotent.records import Claimed, Identity, Record, SettleRequest, State, Stored
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.redis.store import RedisStore

LEASE_MS = 60_000
KEEP_MS = 24 * 3_600_000
FINGERPRINT = bytes(range(16))

#: 100 bytes of JSON.
RESULT = Stored("application/json", "utf-8", b'"' + b"r" * 98 + b'"')

Call = Callable[[], object]


def identity(number: int) -> Identity:
    """Return the identity of an order."""
    return Identity(namespace="shop.tasks.charge", key=f"order-{number:020}")


def prepared_claim(store: Store, identity: Identity) -> Call:
    """Return the call with which a worker claims the key."""
    return functools.partial(
        store.claim,
        records.ClaimRequest(
            identity=identity,
            attempt=os.urandom(8),
            lease_ms=LEASE_MS,
            keep_ms=KEEP_MS,
            fingerprint=FINGERPRINT,
            task_id=str(uuid.uuid4()),
            worker="worker-1.example.com:12345",
        ),
    )


def claim(store: Store, identity: Identity) -> Record:
    """Claim a key that is free."""
    answer = prepared_claim(store, identity)()
    assert isinstance(answer, Claimed)
    return answer.record


def settle(store: Store, record: Record) -> bool:
    """Settle as a worker does."""
    return store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=RESULT, keep_ms=KEEP_MS)
    )


def prepared_settle_with_result(
    store: RedisStore, record: Record
) -> Callable[[], records.SettledWith]:
    """Return the call with which a worker settles whose result backend is the store's own database.

    It writes what Celery would write for the result, 172 bytes.
    """
    task_id = str(uuid.uuid4())
    meta: dict[str, Any] = {"status": "SUCCESS", "result": None, "traceback": None, "children": []}
    meta |= {"date_done": "2026-01-01T00:00:00.000000+00:00", "task_id": task_id}
    return functools.partial(
        store.settle_with_result,
        SettleRequest(record=record, state=State.COMPLETED, value=RESULT, keep_ms=KEEP_MS),
        records.ResultWrite(
            key=f"celery-task-meta-{task_id}".encode(),
            payload=json.dumps(meta).encode(),
            expires_s=KEEP_MS // 1000,
        ),
    )


def prepared_renew(store: Store, record: Record) -> Call:
    """Return the call with which a heartbeat renews one lease."""
    times = {"lease_ms": LEASE_MS, "keep_ms": KEEP_MS}
    lease = records.Renewal(identity=record.identity, token=record.token, **times)
    return functools.partial(store.renew, [lease])


def redis_operations(url: str) -> Mapping[str, Callable[[], Call]]:
    """Return what prepares a call of each verb, on a record in the state that it is for; empties the server."""
    store, client = RedisStore(url), redis.Redis.from_url(url)
    free = map(identity, itertools.count())
    client.flushall()
    one = client.script_load("return 1")

    def held() -> Record:
        return claim(store, next(free))

    def completed() -> Identity:
        record = held()
        settle(store, record)
        return record.identity

    def release() -> Call:
        record = held()
        return functools.partial(store.release, record.identity, token=record.token)

    return {
        "bare EVALSHA": lambda: functools.partial(client.evalsha, one, 0),
        "claim": lambda: prepared_claim(store, next(free)),
        "settle": lambda: functools.partial(settle, store, held()),
        "settle with the task's result": lambda: prepared_settle_with_result(store, held()),
        "release": release,
        "renew": lambda: prepared_renew(store, held()),
        "claim of a completed key (replay)": lambda: prepared_claim(store, completed()),
    }


def time_in_rounds(
    operations: Mapping[str, Callable[[], Call]], rounds: int, calls: int, seed: int
) -> None:
    """Time ``calls`` of each, in another order each round; print one JSON object a round, but for the first."""
    order = random.Random(seed)
    for number in range(-1, rounds):
        times = {}
        for name in order.sample(list(operations), len(operations)):
            prepared = [operations[name]() for _ in range(calls)]
            times[name] = [_time(call) for call in prepared]
        if number >= 0:
            print(json.dumps({name: times[name] for name in operations}), flush=True)


def _time(call: Call) -> int:
    before = time.perf_counter_ns()
    call()
    return time.perf_counter_ns() - before
