"""Real workers with a cache before PostgreSQL: whatever happens to the cache, each key takes effect once."""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django.store import DjangoStore
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Claimed, ClaimRequest, Identity, Settled, SettleRequest, State
from celery_idempotent.stores import open_store
from celery_idempotent.stores.hybrid.cache import Cached, RedisCache, Ticket
from celery_idempotent.stores.hybrid.store import HybridStore
from tests.faults.conftest import Stage
from tests.sql.conftest import sql_databases, use_database  # noqa: F401
from tests.stores.servers import redis_binary, running
from tests.support.ledger import Ledger
from tests.support.servers import EmbeddedRedis, RabbitMQ
from tests.support.waiting import wait_for
from tests.support.workers import Worker, freeze

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq, pytest.mark.slow]


@pytest.fixture
def alias(use_database: Callable[..., str]) -> str:  # noqa: F811
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
        "DJANGO_SETTINGS_MODULE": "tests.sql_faults.hybrid_settings",
        "HYBRID_DATABASES": json.dumps(settings),
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

    def cached() -> bool:
        """One duplicate after another until the worker dares to ask the cache again, and fills it."""
        value = stage.succeeds(stage.send("work", keys[0]))
        assert value == f"done by {sent[0].id}"
        found = hybrid.cache.look(identity_of(stage, keys[0]))
        return isinstance(found, Cached)

    wait_for(cached, 40, "the cache to be filled again", interval=0.3)
    assert stage.effects(keys[0]) == 1


def test_a_key_is_forgotten_only_when_the_cache_knows(
    stage: Stage, hybrid: Any, private_redis: EmbeddedRedis
):
    stage.worker()
    first = stage.send("work", "k")
    assert stage.succeeds(first) == f"done by {first.id}"
    name = identity_of(stage, "k")
    assert isinstance(hybrid.cache.look(name), Cached)
    private_redis.freeze()
    with pytest.raises(StoreUnavailable):
        hybrid.forget(name)
    assert stage.succeeds(stage.send("work", "k")) == f"done by {first.id}"
    private_redis.thaw()
    # What the frozen one was told meanwhile it does now, too: nothing is answered by it.
    assert hybrid.forget(name) is True
    again = stage.send("work", "k")
    assert stage.succeeds(again) == f"done by {again.id}"
    assert stage.succeeds(stage.send("work", "k")) == f"done by {again.id}"
    assert stage.effects("k") == 2


def test_a_forgotten_key_stays_forgotten_when_a_replica_that_missed_it_takes_over(
    alias: str, tmp_path: Path
):
    name = Identity(namespace="work", key="k")

    def ask(store: HybridStore, task_id: str) -> Any:
        asked: dict[str, Any] = {"lease_ms": 60_000, "keep_ms": 60_000, "attempt": os.urandom(8)}
        return store.claim(ClaimRequest(identity=name, task_id=task_id, **asked))

    truth = DjangoStore(alias)
    with running(redis_binary(), tmp_path) as master, running(redis_binary(), tmp_path) as replica:
        replica.client.replicaof("127.0.0.1", master.port)
        wait_for(
            lambda: replica.client.info("replication")["master_link_status"] == "up",
            what="the replica to follow",
        )
        store = HybridStore(RedisCache(master.url, options={"socket_timeout": 5}), truth)
        record = ask(store, "first").record
        assert store.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
        )
        assert isinstance(store.cache.look(name), Cached)
        wait_for(lambda: replica.client.dbsize() == 2, what="the entry and its generation")
        # A replica is not believed, even while it follows.
        following = HybridStore(RedisCache(replica.url, options={"socket_timeout": 5}), truth)
        assert following.cache.look(name) is None
        assert following.cache.breaker.open
        following.close()

        freeze(replica.process.pid)
        # Or it would read what its socket holds before it obeys.
        master.client.client_kill_filter(_type="replica")
        assert store.forget(name) is True
        store.close()
        master.process.kill()
        master.process.wait(10)
        replica.process.send_signal(signal.SIGCONT)
        replica.client.replicaof("NO", "ONE")
        (old,) = [each for each in replica.client.scan_iter() if each.endswith(b"k")]
        assert replica.client.get(old)[:1] == b"S"

        store = HybridStore(RedisCache(replica.url, options={"socket_timeout": 5}), truth)
        assert isinstance(store.cache.look(name), Ticket)
        answer = ask(store, "second")
        assert isinstance(answer, Claimed)
        assert store.settle(
            SettleRequest(record=answer.record, state=State.COMPLETED, value=None, keep_ms=60_000)
        )
        assert isinstance(ask(store, "third"), Settled)
        assert store.cache.look(name).record.token == answer.record.token  # type: ignore[union-attr]
        store.close()
