"""A guard against getting slower, on the server's side: the commands that Redis runs for a verb, inside its script.

What they take is measured by ``make bench ARGS=saturation``. The calls on the client's side are counted by
tests/unit/test_weight.py.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from celery_idempotent.records import (
    Answer,
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    ResultWrite,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores.redis.store import RedisStore
from tests.support.servers import EmbeddedRedis

HOUR_MS = 3_600_000
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b'"paid"')


def result_of(key: str) -> ResultWrite:
    """Return a task's result, as its backend would write it."""
    return ResultWrite(
        key=f"celery-task-meta-{key}".encode(), payload=b'{"status": "SUCCESS"}', expires_s=86_400
    )


class Verbs:
    """The verbs of one store, short enough for a table."""

    def __init__(self, store: RedisStore) -> None:
        self.store = store

    def claim(self, key: str) -> Answer:
        return self.store.claim(
            ClaimRequest(
                identity=Identity(namespace="shop.tasks.charge", key=key),
                attempt=os.urandom(8),
                lease_ms=60_000,
                keep_ms=HOUR_MS,
                fingerprint=bytes(16),
                task_id=f"task-{key}",
                worker="worker-1",
            )
        )

    def held(self, key: str) -> Record:
        answer = self.claim(key)
        assert isinstance(answer, Claimed)
        return answer.record

    def settle(self, record: Record) -> Record:
        assert self.store.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=HOUR_MS)
        )
        return record

    def fail(self, record: Record) -> None:
        assert self.store.settle(
            SettleRequest(record=record, state=State.FAILED, value=VALUE, keep_ms=HOUR_MS)
        )

    def settle_with_result(self, record: Record) -> None:
        self.store.settle_with_result(
            SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=HOUR_MS),
            result_of(record.identity.key),
        )

    def write_result(self, key: str) -> None:
        assert self.store.write_result(result_of(key))

    def release(self, record: Record) -> None:
        assert self.store.release(record.identity, token=record.token)


#: What is done with a key after what was done before, and the commands that Redis runs then.
COMMANDS: dict[str, tuple[Callable[[Verbs, str], Any], Callable[[Verbs, Any], object], str]] = {
    "a claim": (
        lambda _, key: key,
        Verbs.claim,
        "evalsha time set zadd",
    ),
    "a settle": (
        Verbs.held,
        Verbs.settle,
        "evalsha getrange time zrem set",
    ),
    "a settle with the task's result": (
        Verbs.held,
        Verbs.settle_with_result,
        "evalsha getrange time zrem set set publish",
    ),
    "a settle of a failure": (
        Verbs.held,
        Verbs.fail,
        "evalsha getrange time zrem zadd set",
    ),
    "a duplicate of a completed key": (
        lambda verbs, key: verbs.settle(verbs.held(key)).identity.key,
        Verbs.claim,
        "evalsha time set get",
    ),
    "a duplicate of a held key": (
        lambda verbs, key: verbs.held(key).identity.key,
        Verbs.claim,
        "evalsha time set get",
    ),
    "a result for a duplicate": (
        lambda _, key: key,
        Verbs.write_result,
        "evalsha set publish",
    ),
    "a release": (
        Verbs.held,
        Verbs.release,
        "evalsha getrange time del zrem",
    ),
}


@pytest.fixture
def verbs(private_redis: EmbeddedRedis) -> Iterator[Verbs]:
    store = RedisStore(private_redis.url())
    yield Verbs(store)
    store.close()


@pytest.mark.parametrize("what", COMMANDS)
def test_redis_runs_these_commands_and_no_other(
    verbs: Verbs, private_redis: EmbeddedRedis, what: str
) -> None:
    before, call, expected = COMMANDS[what]
    call(verbs, before(verbs, "first"))  # connects, and has the server load the scripts
    subject = before(verbs, "second")
    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_resetstat()
        call(verbs, subject)
        stats: Any = client.info("commandstats")
    ran = {name.removeprefix("cmdstat_"): each["calls"] for name, each in stats.items()}
    ours = {name: calls for name, calls in ran.items() if not name.startswith(("config", "info"))}
    assert ours == Counter(expected.split())
