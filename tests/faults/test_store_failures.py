"""The store fails before, during and after a run: nothing is lost, nothing is doubled."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

import pytest
import redis

from celery_idempotent import get_store
from celery_idempotent.celery.sweep import sweep
from celery_idempotent.records import State
from tests.faults.conftest import TOGETHER, Stage
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.watch import Results

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


@pytest.mark.parametrize("how", ["cut off", "frozen"])
def test_a_late_worker_stores_no_result_and_tells_nobody(
    set_stage: SetStage, redis_proxy: Proxy, private_redis: EmbeddedRedis, how: str
):
    stage = set_stage(idempotency_lease=1, worker_prefetch_multiplier=1, together=True)
    worker = stage.worker("late")
    late = stage.publish("work", "k", "", "gate")
    child = stage.started("k")
    url = private_redis.url()
    stage.worker("well", conf={"idempotency_store": url, "result_backend": url})
    if how == "frozen":  # its main process is not: the broker notices nothing
        worker.freeze(child)
    else:
        redis_proxy.refuse()
    winner = stage.publish("work", "k")
    assert stage.succeeds(winner) == f"done by {winner.id}"
    settled = stage.record("k")
    assert (settled.state, settled.crashes, settled.attempts) == (State.COMPLETED, 1, 2)
    with redis.Redis.from_url(url) as client, Results(client) as results:
        worker.thaw(child)
        redis_proxy.heal()
        stage.open("gate")
        assert stage.succeeds(late) == f"done by {winner.id}"
        stage.tells("lease_lost", "k")
        assert wait_for(lambda: results.of(late.id), what="its announcement") == ["SUCCESS"]
    assert stage.record("k") == settled


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


@TOGETHER
def test_one_restarted_and_swept_before_the_heartbeats_takes_no_claim_away(
    set_stage: SetStage, persistent_redis: EmbeddedRedis, together: bool
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
            before[key] = stage.record(key)
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
            after = stage.record(key)
            assert (after.token, after.attempts, after.crashes) == (before[key].token, 1, 1)
            assert stage.told("lease_lost", key) == stage.told("settle_failed", key) == 0
            stage.tells("settled", key)


def test_a_full_store_lets_nothing_new_run_and_runs_that_it_let_in_complete(
    set_stage: SetStage, private_redis: EmbeddedRedis
):
    stage = set_stage(idempotency_lease=2)
    worker = stage.worker(concurrency=2)
    inside = stage.publish("work", "inside", "", "gate")
    stage.started("inside")
    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_set("maxmemory", 1)
        try:
            before = stage.record("inside").deadline_ms
            outside = stage.publish("work", "outside")
            # Not a fault of the settings: it tries again.
            stage.says(worker, f"work[{outside.id}] did not run", "cannot serve us at the moment")
            stage.says(worker, "used memory > 'maxmemory'")
            renewed = before + 2000
            wait_for(lambda: stage.record("inside").deadline_ms > renewed, what="renewals")
            stage.open("gate")
            assert stage.succeeds(inside) == f"done by {inside.id}"
            assert stage.state("inside") is State.COMPLETED
            assert stage.starts("outside") == 0
            assert outside.state == "PENDING"
        finally:
            client.config_set("maxmemory", 0)
    stage.ran_once("outside", outside)
    stage.ran_once("inside", inside)
