"""The store is slow, frozen or closed to us, or a signal lands while it answers: one run counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import redis

from celery_idempotent.records import State
from tests.faults.conftest import Stage
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]


def test_a_claim_that_nobody_heard_of_ends_with_its_lease_and_counts_a_crash(
    set_stage: SetStage, redis_proxy: Proxy, digests: dict[str, bytes]
):
    """The server is slower than its client waits, each time: the claim is made, and given up."""
    stage = set_stage(store=f"{redis_proxy.url()}?socket_timeout=1", idempotency_lease=8)
    stage.worker()
    redis_proxy.swallow_replies(digests["claim"], times=None, silent=True)
    result = stage.send("work", "k")
    wait_for(lambda: stage.told("store_failed", "k") >= 2, 60, "claims that were given up")
    assert stage.record("k").state is State.PROCESSING
    redis_proxy.heal()
    stage.ran_once("k", result)
    assert stage.record("k").crashes == 1


def test_a_wrong_password_runs_nothing_loses_nothing_and_is_not_logged(
    set_stage: SetStage, private_redis: EmbeddedRedis, redis_proxy: Proxy
):
    secret = "pa55-w0rd-0f-0urs"
    store = redis_proxy.url().replace("//", f"//:{secret}@")
    stage = set_stage(store=store)
    worker = stage.worker()
    result = stage.send("work", "k")
    stage.says(worker, f"work[{result.id}] did not run")
    (line, *_) = [line for line in worker.log.splitlines() if "did not run" in line]
    assert "ERROR" in line
    assert "Check user and password" in line
    assert stage.starts("k") == 0
    with redis.Redis.from_url(private_redis.url()) as client:
        try:
            client.config_set("requirepass", secret)
            assert stage.succeeds(result) == f"done by {result.id}"
        finally:
            client.execute_command("AUTH", secret)
            client.config_set("requirepass", "")
    stage.ran_once("k", result)
    assert secret not in worker.log
