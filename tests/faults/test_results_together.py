"""The result is stored with its record, by one script: whatever strikes, both are there, or neither, and once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from tests.faults.conftest import Stage
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.watch import States

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]


@pytest.fixture
def server(private_redis: EmbeddedRedis) -> Iterator[redis.Redis]:
    """The Redis of results and records, past whatever is broken. Nothing else is there: messages are in RabbitMQ."""
    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_resetstat()
        yield client


def by_celery(server: redis.Redis) -> int:
    """Return how many results Celery stored by itself."""
    stats = server.info("commandstats")
    return int(stats.get("cmdstat_multi", {"calls": 0})["calls"])


def test_nothing_is_left_to_celery_where_nothing_happens(set_stage: SetStage, server: redis.Redis):
    stage = set_stage(together=True)
    stage.worker()
    for key in "abc":
        assert stage.succeeds(stage.send("work", key))
    assert by_celery(server) == 0


def test_a_key_that_is_forgotten_meanwhile_is_settled_with_its_result(
    set_stage: SetStage, server: redis.Redis
):
    stage = set_stage(together=True)
    stage.worker()
    result = stage.send("work", "k", "", "gate")
    stage.started("k")
    task: Any = stage.client.tasks["work"]
    assert task.idempotency_forget("k", force=True, reason="a test")
    assert stage.record("k") is None
    stage.open("gate")
    stage.ran_once("k", result)


def test_a_late_worker_stores_nothing_and_tells_nobody(
    set_stage: SetStage, redis_proxy: Proxy, private_redis: EmbeddedRedis, server: redis.Redis
):
    stage = set_stage(idempotency_lease=1, worker_prefetch_multiplier=1, together=True)
    stage.worker("cut_off")
    late = stage.send("work", "k", "", "gate")
    stage.started("k")
    url = private_redis.url()
    stage.worker("well", conf={"idempotency_store": url, "result_backend": url})
    redis_proxy.refuse()
    winner = stage.send("work", "k")
    assert stage.succeeds(winner) == f"done by {winner.id}"
    states = States(server, late.id)
    redis_proxy.heal()
    stage.open("gate")
    assert stage.succeeds(late) == f"done by {winner.id}"
    stage.tells("lease_lost", "k")
    assert states.names() == ["SUCCESS"]
    assert states.stored()[0]["result"] == f"done by {winner.id}"
    states.close()
