"""The store fails before, during and after a run: nothing is lost, nothing is doubled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from functools import partial
from urllib.parse import urlsplit

import pytest
import redis

from tests.faults.conftest import TOGETHER, Stage
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.watch import States

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]


def test_store_and_broker_down_together_lose_nothing(
    set_stage: SetStage, redis_proxy: Proxy, rabbitmq_url: str, digests: dict[str, bytes]
):
    address = urlsplit(rabbitmq_url)
    with Proxy(address.hostname or "127.0.0.1", address.port or 5672) as broker:
        netloc = f"{address.username}:{address.password}@127.0.0.1:{broker.port}"
        stage = set_stage(
            worker_broker=address._replace(netloc=netloc).geturl(),
            store=f"{redis_proxy.url()}?socket_timeout=60",
            # The claims below are executed, though nobody hears of it: they last until their lease is over.
            idempotency_lease=3,
        )
        worker = stage.worker(concurrency=2)
        # Both in their claims, and the early one acknowledged: the broker has forgotten it.
        redis_proxy.swallow_replies(digests["claim"], times=None, silent=True)
        sent = {name: stage.publish(name, name) for name in ("work", "early")}
        wait_for(lambda: redis_proxy.swallowed == 2, what="both to ask for their keys")
        wait_for(lambda: active(stage) == {r.id for r in sent.values()}, what="both to be accepted")
        broker.refuse()
        redis_proxy.refuse()
        for name, result in sent.items():
            stage.says(worker, f"{name}[{result.id}] cannot be published")
        assert stage.ledger.count("start") == 0
        broker.heal()
        redis_proxy.heal()
        for name, result in sent.items():
            stage.ran_once(name, result, task=name)
        assert worker.running


def active(stage: Stage) -> set[str]:
    """Return the ids of the tasks that a child has accepted; with early acks they are acknowledged by then."""
    found = stage.app.control.inspect(timeout=0.3).active() or {}
    return {task["id"] for tasks in found.values() for task in tasks}


def test_one_redis_for_store_and_broker_down_loses_nothing(
    set_stage: SetStage, persistent_redis: EmbeddedRedis
):
    url = persistent_redis.url()
    visibility = {
        "visibility_timeout": 3,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    }
    stage = set_stage(broker_url=url, store=url, direct=url, broker_transport_options=visibility)
    worker = stage.worker()
    (child,) = worker.children()
    worker.freeze(child)
    sent = stage.publish("work", "work")
    # Once the main process takes another message, the first is in the pipe of the child.
    stage.says(worker, f"work[{sent.id}] received")
    stage.says(worker, f"work[{stage.publish('work', 'behind').id}] received")
    persistent_redis.kill()
    worker.thaw(child)
    stage.says(worker, f"work[{sent.id}] reject requeue=True")
    assert stage.ledger.count("start") == 0
    # With kombu 5.7 the main process ends when it loses a broker that is gone ("'NoneType' object has no attribute
    # 'hostname'"), and somebody starts it again.
    worker.kill()
    persistent_redis.start()
    worker.start()
    stage.ran_once("work", sent)


def test_a_late_worker_stores_no_result_and_tells_nobody(
    set_stage: SetStage, redis_proxy: Proxy, private_redis: EmbeddedRedis
):
    stage = set_stage(idempotency_lease=1, worker_prefetch_multiplier=1, together=True)
    stage.worker("cut_off")
    late = stage.publish("work", "k", "", "gate")
    stage.started("k")
    url = private_redis.url()
    stage.worker("well", conf={"idempotency_store": url, "result_backend": url})
    redis_proxy.refuse()
    winner = stage.publish("work", "k")
    assert stage.succeeds(winner) == f"done by {winner.id}"
    with redis.Redis.from_url(url) as client, closing(States(client, late.id)) as states:
        redis_proxy.heal()
        stage.open("gate")
        assert stage.succeeds(late) == f"done by {winner.id}"
        stage.tells("lease_lost", "k")
        assert [each["result"] for each in states.stored()] == [f"done by {winner.id}"]


@pytest.mark.parametrize(
    "silent",
    [pytest.param(False, id="cut"), pytest.param(True, id="silent", marks=pytest.mark.wide)],
)
@TOGETHER
def test_lost_answers_double_nothing_and_nothing_conflicts_with_itself(
    set_stage: SetStage, redis_proxy: Proxy, digests: dict[str, bytes], silent: bool, together: bool
):
    stage = set_stage(store=f"{redis_proxy.url()}?socket_timeout=1", together=together)
    stage.worker()
    # Twice: once for the connection that may have been idle for long, once for the fresh one.
    times = 1 if silent else 2
    for verb in ("claim", "settle"):
        lost = redis_proxy.swallowed
        redis_proxy.swallow_replies(digests[verb], times=times, silent=silent)
        stage.ran_once(verb, stage.publish("work", verb))
        assert redis_proxy.swallowed == lost + times
        stage.tells("settled", verb)
    redis_proxy.swallow_replies(digests["release"], times=times, silent=silent)
    stage.fails(stage.publish("work", "release", "fails once"))
    assert redis_proxy.swallowed == lost + 2 * times
    assert stage.record("release") is None
    stage.ran_once("release", stage.publish("work", "release", "fails once"))
    assert stage.ledger.count("conflicted") == 0
    for verb in ("claim", "settle", "release"):
        assert (stage.record(verb).attempts, stage.record(verb).crashes) == (1, 0)


def warm_up(stage: Stage, children: int) -> None:
    """Have each child connect: a new connection to a frozen server would not get as far as the claim."""
    warm = [stage.publish("work", f"warm {n}", "", "warm") for n in range(children)]
    for n in range(children):
        stage.started(f"warm {n}")
    stage.open("warm")
    for result in warm:
        stage.succeeds(result)


@pytest.mark.parametrize("how", ["frozen", "cut"])
def test_claims_without_an_answer_cost_neither_a_lease_nor_a_crash(
    set_stage: SetStage,
    private_redis: EmbeddedRedis,
    redis_proxy: Proxy,
    digests: dict[str, bytes],
    how: str,
):
    """Frozen, the store carries the claims out when it thaws; cut, at once."""
    url = private_redis.url() if how == "frozen" else redis_proxy.url()
    stage = set_stage(store=f"{url}?socket_timeout=1", idempotency_on_stale="fail")
    stage.worker(concurrency=3)
    warm_up(stage, 3)
    if how == "frozen":
        private_redis.freeze()
    else:
        redis_proxy.swallow_replies(digests["claim"], times=None, silent=True)
    sent = {key: stage.publish("work", key) for key in ("a", "b", "c")}
    for key in sent:
        wait_for(partial(stage.told, "store_failed", key), 30, "a claim that is given up")
    private_redis.thaw()
    redis_proxy.heal()
    for key, result in sent.items():
        stage.ran_once(key, result)
        assert stage.record(key).crashes == 0


def test_a_process_that_ends_takes_back_its_claim_without_an_answer(
    set_stage: SetStage, private_redis: EmbeddedRedis
):
    stage = set_stage(store=f"{private_redis.url()}?socket_timeout=1")
    worker = stage.worker(concurrency=1)
    (child,) = worker.children()
    warm_up(stage, 1)
    private_redis.freeze()
    result = stage.publish("work", "k")
    wait_for(lambda: active(stage) == {result.id}, what="the task to be accepted")
    time.sleep(0.3)  # the claim is on its way: nothing tells
    os.kill(child, signal.SIGTERM)
    time.sleep(2)  # longer than its last try
    private_redis.thaw()
    stage.ran_once("k", result)
    assert stage.record("k").crashes == 0


def test_a_wrong_password_runs_nothing_loses_nothing_and_is_not_logged(
    set_stage: SetStage, private_redis: EmbeddedRedis, redis_proxy: Proxy
):
    secret = "pa55-w0rd-0f-0urs"
    store = redis_proxy.url().replace("//", f"//:{secret}@")
    stage = set_stage(store=store)
    worker = stage.worker()
    result = stage.publish("work", "k")
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
