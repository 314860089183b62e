"""Outages at other moments and of other kinds: whatever is away for a while, one run counts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import urlsplit

import pytest
import redis

from celery_idempotent import get_store
from celery_idempotent.celery.sweep import sweep
from celery_idempotent.records import Record, State
from tests.faults.conftest import TOGETHER, Stage
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]


def the_record(stage: Stage, key: str) -> Record:
    record = stage.record(key)
    assert isinstance(record, Record)
    return record


def deadline(stage: Stage, key: str) -> int:
    return the_record(stage, key).deadline_ms or 0


class TestOfTheStoreDuringARun:
    def test_a_claim_survives_one_shorter_than_its_lease(
        self, set_stage: SetStage, redis_proxy: Proxy, private_redis: EmbeddedRedis
    ):
        stage = set_stage(idempotency_lease=4, worker_prefetch_multiplier=1)
        worker = stage.worker()
        result = stage.publish("work", "k", "", "gate")
        stage.started("k")
        # Somebody else, whose store never fails, looks for an end of this claim all the time.
        stage.worker("other", conf={"idempotency_store": private_redis.url()})
        again = stage.publish("work", "k")
        wait_for(lambda: stage.told("conflicted", "k"), what="the conflict")
        before = the_record(stage, "k")
        redis_proxy.refuse()
        wait_for(lambda: "could not renew 1 claims" in worker.log, what="a renewal to fail")
        redis_proxy.heal()
        wait_for(
            lambda: deadline(stage, "k") > (before.deadline_ms or 0) + 4000,
            what="the lease to go on for a whole one more",
        )
        assert the_record(stage, "k").token == before.token
        stage.open("gate")
        assert stage.succeeds(result) == stage.succeeds(again) == f"done by {result.id}"
        assert stage.starts("k") == stage.effects("k") == 1
        assert stage.told("lease_lost", "k") == 0

    @TOGETHER
    def test_one_restarted_and_swept_before_the_heartbeats_takes_no_claim_away(
        self, set_stage: SetStage, persistent_redis: EmbeddedRedis, together: bool
    ):
        where = {"direct": persistent_redis.url(), "together": together}
        with Proxy("127.0.0.1", persistent_redis.port) as proxy:
            stage = set_stage(store=proxy.url(), **where, idempotency_lease=2)
            stage.worker(concurrency=4)
            # Two end while their store is away, two outlive it.
            gates = {"a": "now", "b": "now", "c": "later", "d": "later"}
            sent = {key: stage.publish("work", key, "", gate) for key, gate in gates.items()}
            before = {}
            for key in sent:
                stage.started(key)
                before[key] = the_record(stage, key)
            proxy.refuse()
            persistent_redis.kill()
            persistent_redis.start()
            store = get_store(stage.app)
            wait_for(lambda: store.stats().stale == len(sent), what="the ends of the leases")
            sweep(stage.app)
            assert {stage.state(key) for key in sent} == {State.INTERRUPTED}
            stage.open("now")
            wait_for(lambda: stage.effects("a") and stage.effects("b"), what="two runs to end")
            proxy.heal()
            processing = {State.PROCESSING}
            wait_for(lambda: {stage.state("c"), stage.state("d")} == processing, what="renewals")
            stage.open("later")
            for key, result in sent.items():
                stage.ran_once(key, result)
                after = the_record(stage, key)
                assert (after.token, after.attempts, after.crashes) == (before[key].token, 1, 1)
                assert stage.told("lease_lost", key) == stage.told("settle_failed", key) == 0
                stage.tells("settled", key)

    def test_one_frozen_when_a_child_is_lost_does_not_hold_up_the_worker(
        self, set_stage: SetStage, private_redis: EmbeddedRedis
    ):
        # Time enough to wait for the store that a wait would be seen.
        stage = set_stage(store=f"{private_redis.url()}?socket_timeout=25")
        worker = stage.worker(concurrency=2)
        result = stage.publish("work", "k", "hangs once")
        child = stage.started("k")
        private_redis.freeze()
        worker.kill_child(child)
        wait_for(
            lambda: len(worker.children()) == 2 and child not in worker.children(),
            30,
            "the child to be replaced",
        )
        stage.publish("hold", "")
        wait_for(lambda: stage.ledger.count("held"), 8, "another task to run")
        private_redis.thaw()
        stage.ran_once("k", result)
        assert stage.starts("k") == 2
        stage.tells("interrupted", "k")


class TestOfMemory:
    @pytest.fixture
    def set_limit(self, private_redis: EmbeddedRedis) -> Iterator[Callable[[int], None]]:
        client = redis.Redis.from_url(private_redis.url())

        def set_limit(limit: int) -> None:
            client.config_set("maxmemory", limit)

        yield set_limit
        set_limit(0)
        client.close()

    def test_a_full_store_lets_nothing_new_run_and_runs_that_it_let_in_complete(
        self, set_stage: SetStage, set_limit: Callable[[int], None]
    ):
        stage = set_stage(idempotency_lease=2)
        worker = stage.worker(concurrency=2)
        inside = stage.publish("work", "inside", "", "gate")
        stage.started("inside")
        set_limit(1)
        before = deadline(stage, "inside")
        outside = stage.publish("work", "outside")
        wait_for(lambda: f"work[{outside.id}] did not run" in worker.log, what="the refusal")
        # Not a fault of the settings: it tries again.
        stage.says(worker, "cannot serve us at the moment", "used memory > 'maxmemory'")
        wait_for(lambda: deadline(stage, "inside") > before + 2000, what="renewals")
        stage.open("gate")
        assert stage.succeeds(inside) == f"done by {inside.id}"
        assert stage.state("inside") is State.COMPLETED
        assert stage.starts("outside") == 0
        assert outside.state == "PENDING"
        set_limit(0)
        stage.ran_once("outside", outside)
        stage.ran_once("inside", inside)


class TestOfTheResultBackend:
    def test_a_result_that_could_not_be_handed_in_is_not_worked_for_again(
        self, set_stage: SetStage
    ):
        stage = set_stage()
        address = urlsplit(stage.settings["result_backend"])
        with Proxy("127.0.0.1", address.port or 6379) as results:
            policy = {"max_retries": 1, "interval_start": 0.1, "interval_step": 0}
            options = {"retry_policy": policy}
            behind = address._replace(netloc=f"127.0.0.1:{results.port}").geturl()
            worker = stage.worker(
                conf={"result_backend": behind, "result_backend_transport_options": options}
            )
            lost = stage.publish("work", "k", "", "gate")
            stage.started("k")
            results.refuse()
            stage.open("gate")
            wait_for(lambda: stage.state("k") is State.COMPLETED, what="the settle")
            wait_for(lambda: "Connection refused" in worker.log, 30, "the result to be refused")
            results.heal()
            again = stage.publish("work", "k")
            assert stage.succeeds(again) == f"done by {lost.id}"
            assert stage.starts("k") == stage.effects("k") == 1
