"""The store is slow, frozen or closed to us, or a signal lands while it answers: one run counts."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import redis
from celery.result import AsyncResult

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


def test_frozen_before_the_claim_and_before_the_settle_for_three_seconds(
    set_stage: SetStage, redis_proxy: Proxy, private_redis: EmbeddedRedis
):
    # A lease of 2 s: a claim that gave up may still be in the frozen server's ears.
    stage = set_stage(
        store=f"{private_redis.url()}?socket_timeout=1&socket_connect_timeout=1",
        idempotency_lease=4,
    )
    stage.worker()
    private_redis.freeze()
    frozen = time.monotonic()
    result = stage.send("work", "claim")
    while time.monotonic() - frozen < 3:
        assert stage.ledger.count("start") == 0
        time.sleep(0.1)
    private_redis.thaw()
    stage.ran_once("claim", result)

    result = stage.send("work", "settle", "", "gate")
    stage.started("settle")
    private_redis.freeze()
    frozen = time.monotonic()
    stage.open("gate")
    wait_for(lambda: stage.effects("settle"), what="the run to end")
    while time.monotonic() - frozen < 3:
        assert result.state == "PENDING"
        time.sleep(0.1)
    private_redis.thaw()
    stage.ran_once("settle", result)
    stage.tells("settled", "settle")


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


class TestSignalsDuringTheSettle:
    """A signal that lands when run() has returned undoes nothing."""

    def strike(
        self, stage: Stage, proxy: Proxy, settle: bytes, number: signal.Signals
    ) -> AsyncResult[Any]:
        result = stage.send("work", "k", "", "gate")
        child = stage.started("k")
        # The server executes the settle; the child waits for an answer, for longer than this test waits for anything.
        proxy.swallow_replies(settle, silent=True)
        stage.open("gate")
        wait_for(lambda: proxy.swallowed, what="the settle to be under way")
        assert stage.effects("k") == 1
        os.kill(child, number)
        return result

    def test_a_soft_limit(self, set_stage: SetStage, redis_proxy: Proxy, digests: dict[str, bytes]):
        stage = set_stage(store=f"{redis_proxy.url()}?socket_timeout=60")
        stage.worker()
        result = self.strike(stage, redis_proxy, digests["settle"], signal.SIGUSR1)
        stage.ran_once("k", result)
        assert stage.told("released", "k") == 0
        stage.tells("settled", "k")

    def test_a_termination(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: dict[str, bytes]
    ):
        stage = set_stage(store=f"{redis_proxy.url()}?socket_timeout=60")
        worker = stage.worker()
        result = self.strike(stage, redis_proxy, digests["settle"], signal.SIGTERM)
        # The child is lost, its message unacknowledged: the redelivery replays.
        stage.ran_once("k", result)
        assert stage.starts("k") == 1
        assert stage.told("released", "k") == 0
        assert worker.running
