"""A guard against getting slower, on the server's side: the commands that Redis runs for a verb, inside its script.

Their time is measured by ``python -m benchmarks server``. The calls on the client's side are counted by
tests/unit/test_weight.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_idempotent.records import Identity, Record, ResultWrite, SettleRequest, State
from celery_idempotent.stores.redis.store import RedisStore
from tests.stores.verbs import KEEP_MS, VALUE, ask, claim, settle
from tests.support.servers import EmbeddedRedis

RESULT = ResultWrite(key=b"celery-task-meta-1", payload=b'{"status": "SUCCESS"}', expires_s=86_400)


def settle_with_result(store: RedisStore, record: Record) -> None:
    store.settle_with_result(
        SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=KEEP_MS), RESULT
    )


def slow(store: RedisStore, key: Identity) -> Record:
    record = claim(store, key)
    store._clock = RedisStore._clock
    return record


def completed(store: RedisStore, key: Identity) -> Identity:
    settle(store, claim(store, key))
    return key


def held(store: RedisStore, key: Identity) -> Identity:
    return claim(store, key).identity


def free(_: RedisStore, key: Identity) -> Identity:
    return key


def release(store: RedisStore, record: Record) -> bool:
    return store.release(record.identity, token=record.token)


#: For each verb: what is done with the key before, the verb, and the commands that Redis runs for it.
COMMANDS: dict[str, tuple[Callable[..., Any], Callable[..., object], str]] = {
    "a claim": (free, ask, "evalsha time set zadd"),
    "a settle": (claim, settle, "evalsha getrange zrem set"),
    "a settle long after the last claim": (slow, settle, "evalsha getrange time zrem set"),
    "a settle with the task's result": (
        claim, settle_with_result, "evalsha getrange zrem set set publish",
    ),
    "a settle of a failure": (
        claim,
        lambda store, record: settle(store, record, State.FAILED),
        "evalsha getrange time zrem zadd set",
    ),
    "a duplicate of a completed key": (completed, ask, "evalsha time set get"),
    "a duplicate of a held key": (held, ask, "evalsha time set get"),
    "a result for a duplicate": (
        free, lambda store, _: store.write_result(RESULT), "multi set publish exec",
    ),
    "a release": (claim, release, "evalsha getrange del zrem"),
}  # fmt: skip


@pytest.fixture
def store(private_redis: EmbeddedRedis) -> Iterator[RedisStore]:
    store = RedisStore(private_redis.url())
    yield store
    store.close()


@pytest.mark.parametrize("what", COMMANDS)
def test_redis_runs_these_commands_and_no_other(
    store: RedisStore, private_redis: EmbeddedRedis, what: str
) -> None:
    before, call, expected = COMMANDS[what]
    # The first call connects, and has the server load the scripts.
    call(store, before(store, Identity(namespace="charge", key="first")))
    subject = before(store, Identity(namespace="charge", key="second"))
    with redis.Redis.from_url(private_redis.url()) as client:
        client.delete(RESULT.key)
        client.config_resetstat()
        call(store, subject)
        stats: Any = client.info("commandstats")
    ran = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    ours = {name: calls for name, calls in ran.items() if not name.startswith(("config", "info"))}
    assert ours == Counter(expected.split())
