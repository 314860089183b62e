"""Real workers with a cache before PostgreSQL: whatever happens to the cache, each key takes effect once."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.records import Identity, State
from celery_idempotent.stores import open_store
from tests.faults.conftest import Stage
from tests.support.ledger import Ledger
from tests.support.servers import EmbeddedRedis, RabbitMQ
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq, pytest.mark.slow]


@pytest.fixture
def alias(use_database: Callable[..., str]) -> str:
    return use_database("postgresql")


@pytest.fixture
def url(alias: str, private_redis: EmbeddedRedis) -> str:
    return f"hybrid+{private_redis.url()}?truth={alias}"


@pytest.fixture
def hybrid(url: str) -> Iterator[Any]:
    store = open_store(url)
    yield store
    store.close()


@pytest.fixture
def stage(
    alias: str,
    url: str,
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq: RabbitMQ,
    rabbitmq_queue: str,
    redis_url: str,
    prefix: str,
) -> Iterator[Stage]:
    """Results in the shared Redis, messages in RabbitMQ, the test's own way to the records past the cache."""
    settings = {alias: connections.databases[alias], "default": connections.databases[alias]}
    django = {
        "DJANGO_SETTINGS_MODULE": "tests.sql.atomic_settings",
        "ATOMIC_DATABASES": json.dumps(settings),
    }

    def start(app: str, *, env: dict[str, Any], **options: Any) -> Worker:
        return start_worker(app, env={**env, **django}, **options)

    made = Stage(
        start_worker=start,
        ledger=ledger,
        broker=rabbitmq.url,
        worker_broker=rabbitmq.url,
        backend=redis_url,
        store=url,
        direct=f"django://{alias}",
        queue=rabbitmq_queue,
        conf={
            "idempotency_lease": 30,
            "result_backend_transport_options": {"global_keyprefix": prefix},
        },
    )
    yield made
    made.client.close()


def identity_of(stage: Stage, key: str) -> Identity:
    record = stage.record(key)
    found: Identity = record.identity
    return found


def flush(server: EmbeddedRedis) -> None:
    client = redis.Redis.from_url(server.url())
    client.flushall()
    client.close()


def test_flushed_frozen_killed_and_back_empty_under_work_the_cache_costs_no_second_effect(
    stage: Stage, hybrid: Any, private_redis: EmbeddedRedis
):
    stage.worker(concurrency=2)
    batches = [[f"k{n}{m}" for m in range(6)] for n in range(4)]
    keys = list(itertools.chain(*batches))
    sent = [stage.send("work", key) for key in batches[0]]

    def more(number: int) -> None:
        """New keys, and all so far once more."""
        again = itertools.chain(*batches[:number])
        sent.extend(stage.send("work", key) for key in [*batches[number], *again])

    stage.succeeds(sent[0])
    flush(private_redis)
    more(1)
    stage.succeeds(sent[9])
    private_redis.freeze()
    more(2)
    for result in sent[:12]:
        stage.succeeds(result)
    private_redis.thaw()
    private_redis.kill()
    more(3)
    for result in sent:
        stage.succeeds(result)
    assert [stage.effects(key) for key in keys] == [1] * len(keys)
    assert {stage.state(key) for key in keys} == {State.COMPLETED}
    private_redis.start()
    flush(private_redis)

    value = stage.succeeds(stage.send("work", keys[0]))
    assert value == f"done by {sent[0].id}"
    assert stage.effects(keys[0]) == 1
    more_keys = itertools.count()

    def cached() -> bool:
        """One key after another until the worker dares to ask the cache again, and fills it."""
        key = f"after {next(more_keys)}"
        stage.succeeds(stage.send("work", key))
        return hybrid.cache.look(identity_of(stage, key)) is not None

    wait_for(cached, 40, "the cache to be filled again", interval=0.3)
