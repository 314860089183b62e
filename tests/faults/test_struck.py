"""Limits, signals, revokes, shutdowns: what strikes around a run, and what a child that is gone held is free."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import celery
import pytest

from celery_idempotent import TooManyCrashes
from celery_idempotent.celery.delivery import identify_delivery
from celery_idempotent.records import State
from celery_idempotent.stores import get_store
from tests.delivery.app import make_app
from tests.faults.conftest import Stage
from tests.support.apps import environment
from tests.support.proxy import Proxy
from tests.support.records import claim_key
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.workers import alive, child_environment

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]
Digests = dict[str, bytes]


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_limit_or_an_end_that_strikes_while_a_claim_is_unanswered_frees_the_key(
    set_stage: SetStage, redis_proxy: Proxy, digests: Digests, number: signal.Signals
):
    """The key may be ours by now, or not: nothing ran, so it is given back."""
    stage = set_stage(store=f"{redis_proxy.url()}?socket_timeout=60")
    worker = stage.worker()
    (child,) = worker.children()
    redis_proxy.swallow_replies(digests["claim"], silent=True)
    result = stage.publish("work", "k")
    wait_for(lambda: redis_proxy.swallowed, what="the claim to be executed")
    assert stage.state("k") is State.PROCESSING
    os.kill(child, number)
    if number is signal.SIGUSR1:
        assert type(stage.fails(result)).__name__ == "SoftTimeLimitExceeded"
        assert stage.record("k") is None
        assert stage.starts("k") == 0
        result = stage.publish("work", "k")
    stage.ran_once("k", result)
    record = stage.record("k")
    assert record is not None
    assert (record.attempts, record.crashes, stage.starts("k")) == (1, 0, 1)


@pytest.mark.parametrize("how", ["fails once", "retries once"])
def test_a_failure_and_a_retry_stay_what_they_are_and_the_key_is_released_later(
    set_stage: SetStage, redis_proxy: Proxy, how: str
):
    """Their release does not get through: the key is free when the store is back."""
    stage = set_stage()
    worker = stage.worker()
    result = stage.publish("work", "k", how, "gate")
    stage.started("k")
    redis_proxy.refuse()
    stage.open("gate")
    stage.says(worker, "could not release work key k")
    retries = how == "retries once"
    if not retries:
        assert repr(stage.fails(result)) == "ValueError('k')"
        assert stage.state("k") is State.PROCESSING
    redis_proxy.heal()
    stage.ran_once("k", result if retries else stage.publish("work", "k"))
    assert (stage.starts("k"), stage.record("k").crashes) == (2, 0)
    assert stage.ledger.count("retries 1", "k") == retries


@pytest.mark.parametrize("linked", [False, True], ids=["it stores", "it sends"])
def test_a_soft_limit_that_strikes_while_celery_is_busy_with_a_task_fails_nothing(
    set_stage: SetStage, linked: bool
):
    """The task is done, and its limit is that of no other task."""
    stage = set_stage()
    worker = stage.worker()
    (child,) = worker.children()
    hold = stage.app.tasks["hold"]
    result = stage.publish("struck", "k", 2, link=hold.s() if linked else None)
    assert stage.succeeds(result) == "struck"
    assert stage.state("k", "struck") is State.COMPLETED
    if not linked:
        hold.delay("never")
    wait_for(lambda: stage.ledger.count("held"), what="a task of Celery's own in this child")
    os.kill(child, signal.SIGUSR1)
    stage.says(worker, "SoftTimeLimitExceeded()")


@pytest.mark.parametrize(
    ("task", "effects", "state"), [("struck_before", 0, None), ("struck", 1, State.COMPLETED)]
)
def test_a_soft_limit_that_strikes_around_the_body_of_an_eager_call_is_raised_in_its_caller(
    set_stage: SetStage, task: str, effects: int, state: State | None
):
    stage = set_stage()
    stage.worker()
    assert stage.succeeds(stage.publish("calls", "k", task, 1)) == "limited"
    assert stage.effects("inner k") == effects
    assert stage.state("inner k", task) is state


#: How soon after the end of its process a claim must be free, in seconds, and a lease that would take longer.
SOON = 60
LONG = 300


def free(stage: Stage, key: str) -> bool:
    return stage.state(key) in (None, State.INTERRUPTED)


@pytest.mark.skipif(celery.VERSION[:2] < (5, 5), reason="Celery 5.4 drops such a message")
@pytest.mark.parametrize("given", ["message", "command line", "none: it kills its process"])
def test_a_task_that_always_meets_its_hard_limit_is_failed_after_the_crashes_allowed(
    set_stage: SetStage, given: str
):
    stage = set_stage(task_acks_on_failure_or_timeout=False, idempotency_lease=LONG)
    stage.worker(arguments=["--time-limit", "1"] if given == "command line" else [])
    options = {"time_limit": 1} if given == "message" else {}
    mood, gate = ("kills", "") if given.startswith("none") else ("", "never")
    stage.publish("work", "k", mood, gate, **options)
    # SIGTERM ends each run, and comes before SIGKILL: the run must not take it for a shutdown.
    wait_for(lambda: stage.state("k") is State.FAILED, SOON, "the key to be FAILED")
    assert stage.starts("k") == 4
    assert stage.effects("k") == 0
    assert stage.record("k").crashes == 4
    assert type(stage.fails(stage.publish("work", "k"))) is TooManyCrashes
    assert stage.length() == 0


@pytest.mark.parametrize(
    "number",
    ["SIGTERM", pytest.param("SIGKILL", marks=pytest.mark.wide)],
)
def test_a_terminated_child_leaves_the_key_free(set_stage: SetStage, number: str):
    stage = set_stage(idempotency_lease=LONG)
    worker = stage.worker()
    victim = stage.publish("work", "k", "hangs once")
    child = stage.started("k")
    stage.app.control.revoke(victim.id, terminate=True, signal=number)
    wait_for(lambda: not alive(child), what="the child to end")
    # The loss of a child is noticed at once or, by a timer of the pool's, after 5 s.
    wait_for(lambda: f"{child} exited" in worker.log or free(stage, "k"), SOON, "notice of it")
    wait_for(lambda: free(stage, "k"), SOON, "the key to be free")
    stage.ran_once("k", stage.publish("work", "k"))
    assert str(victim.state) == "REVOKED"


def test_a_cold_shutdown_gives_the_key_back_and_the_redelivery_runs(set_stage: SetStage):
    stage = set_stage()
    worker = stage.worker()
    result = stage.publish("work", "k", "hangs once")
    stage.started("k")
    worker.send_signal(signal.SIGQUIT)
    worker.wait()
    assert free(stage, "k")
    assert stage.told("released", "k") + stage.told("interrupted", "k") >= 1
    assert stage.length() == 1
    worker.start()
    stage.ran_once("k", result)
    assert stage.starts("k") == 2


@pytest.mark.skipif(celery.VERSION[:2] < (5, 7), reason="Celery 5.7 brought it")
@pytest.mark.parametrize(
    "task", ["sent_again_early", pytest.param("sent_again", marks=pytest.mark.wide)]
)
def test_a_retry_that_celery_sends_for_a_lost_child_runs_under_the_same_key(
    set_stage: SetStage, task: str
):
    """``task_retry_on_worker_lost``"""
    stage = set_stage()
    worker = stage.worker()
    result = stage.publish(task, "k", "hangs once")
    worker.kill_child(stage.started("k"))
    stage.ran_once("k", result, task=task)
    assert stage.starts("k") == 2
    assert stage.ledger.count("retries 1", "k") == 1, "a retry, and no redelivery"
    assert stage.record("k", task).crashes == 1
    assert stage.length() == 0


#: What the main process of a worker does with its first lost child, and which modules that imports in which thread.
_PROGRAM = """
import subprocess, sys, threading, time

import celery.bin.worker, celery.concurrency.prefork, celery.worker.request, kombu.transport.pyamqp
from celery_idempotent.celery import worker
from celery_idempotent.signals import worker_name
from tests.delivery.app import app

app.finalize()
task = app.tasks["work"]
imported = []

class Notice:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            imported.append(name)

sys.meta_path.insert(0, Notice())
ended = subprocess.Popen(["true"])
ended.wait()
print(worker_name(ended.pid), flush=True)
sys.stdin.readline()

class Delivery:
    task, id, worker_pid = task, "t", ended.pid
    request_dict, _payload, _loss_handled = {}, (["k"], {}, {}), False
    _child_lost = worker.Request._child_lost

threads = []
start = threading.Thread.start
threading.Thread.start = lambda self: (threads.append(self), start(self))[1]
Delivery()._child_lost()
assert {thread.name for thread in threads} == {"idempotency-background"}, threads
for thread in threads:
    thread.join()
print("imported:", *imported)
"""


def test_the_thread_that_tells_of_a_lost_child_imports_nothing(
    private_redis: EmbeddedRedis, tmp_path: Path
):
    """A child forked meanwhile would wait for ever for the lock of a module that nobody imports there."""
    conf = {"broker_url": "memory://", "idempotency_store": private_redis.url()}
    main = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        env=child_environment(environment(conf)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with main:
        assert main.stdout is not None
        lost = main.stdout.readline().strip()
        app = make_app(conf)
        task: Any = app.tasks["work"]
        record = claim_key(
            get_store(app),
            identify_delivery(task._definition, {}, ["k"], {}, task_id="t").identity,
            keep_ms=30_000,
            task_id="t",
            worker=lost,
        )
        output, _ = main.communicate("go on\n", timeout=60)
    assert main.returncode == 0
    # It did all that it can have to do.
    record = task.idempotency_record("k")
    assert (record.state, record.crashes) == (State.INTERRUPTED, 1)
    assert output == "imported:\n"
    get_store(app).close()


def test_the_loss_of_a_child_lets_nobody_in_before_it_is_gone(set_stage: Callable[..., Stage]):
    stage = set_stage()
    stage.worker()
    # The limit is announced at once; a child that is deaf to SIGTERM lives for another 0.1 s.
    late = stage.publish("work", "k", "hangs deaf once", time_limit=2)
    child = stage.started("k")
    lived = True

    def interrupted() -> bool:
        nonlocal lived
        if stage.state("k") is not State.INTERRUPTED:
            return False
        lived = alive(child)
        return True

    wait_for(interrupted, 30, "the claim to be interrupted", interval=0.002)
    assert not lived
    assert type(stage.fails(late)).__name__ == "TimeLimitExceeded"
    assert stage.record("k").crashes == 1
    stage.tells("interrupted", "k")
    stage.ran_once("k", stage.publish("work", "k"))
    assert stage.length() == 0
