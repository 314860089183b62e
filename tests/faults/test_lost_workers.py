"""Time limits, revokes, shutdowns: what a child that is gone held is free at once, what one that lives holds stays."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from typing import Any

import celery
import pytest
from celery.result import AsyncResult

from celery_idempotent import TooManyCrashes
from celery_idempotent.records import State
from tests.faults.conftest import Stage
from tests.support.waiting import wait_for
from tests.support.workers import alive

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]

#: How soon after the end of its process a claim must be free, in seconds, and a lease that would take longer.
SOON = 60
LONG = 300
#: How long nothing may happen: longer than the main process takes to interrupt the claim of a child that is gone.
QUIET = 2.5


def free(stage: Stage, key: str) -> bool:
    return stage.state(key) in (None, State.INTERRUPTED)


def completed(stage: Stage, key: str) -> bool:
    return stage.state(key) is State.COMPLETED


def revoked(result: AsyncResult[Any]) -> bool:
    state: str = result.state
    return state == "REVOKED"


class TestLimits:
    @pytest.mark.skipif(celery.VERSION[:2] < (5, 5), reason="Celery 5.4 drops such a message")
    @pytest.mark.parametrize("given", ["message", "command line", "none: it kills its process"])
    def test_a_task_that_always_meets_its_hard_limit_is_failed_after_the_crashes_allowed(
        self, set_stage: SetStage, given: str
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


class TestRevokes:
    def revoke(self, stage: Stage, task_id: str, number: str, **options: Any) -> None:
        stage.app.control.revoke(task_id, terminate=True, signal=number, **options)

    @pytest.mark.parametrize(
        # Killed: test_undertaker.py.
        "number",
        ["SIGTERM", pytest.param("SIGKILL", marks=pytest.mark.wide)],
    )
    def test_a_terminated_child_leaves_the_key_free(self, set_stage: SetStage, number: str):
        stage = set_stage(idempotency_lease=LONG)
        worker = stage.worker()
        victim = stage.publish("work", "k", "hangs once")
        child = stage.started("k")
        self.revoke(stage, victim.id, number)
        wait_for(lambda: not alive(child), what="the child to end")
        # The loss of a child is noticed at once or, by a timer of the pool's, after 5 s.
        wait_for(lambda: f"{child} exited" in worker.log or free(stage, "k"), SOON, "notice of it")
        wait_for(lambda: free(stage, "k"), SOON, "the key to be free")
        stage.ran_once("k", stage.publish("work", "k"))
        assert revoked(victim)

    def test_a_child_that_ignores_the_signal_keeps_its_claim(self, set_stage: SetStage):
        stage = set_stage()
        worker = stage.worker()
        victim = stage.publish("work", "k", "", "gate")
        child = stage.started("k")
        before = stage.record("k")
        self.revoke(stage, victim.id, "SIGINT")
        stage.says(worker, f"Terminating {victim.id}")
        wait_for(lambda: revoked(victim), what="its announcement")
        # Longer than the main process takes to interrupt the claim of a child that is gone.
        until = time.monotonic() + QUIET
        while time.monotonic() < until:
            assert alive(child)
            assert stage.record("k") == before
            time.sleep(0.1)
        stage.open("gate")
        wait_for(lambda: stage.state("k") is State.COMPLETED, what="the run to end")
        assert stage.told("interrupted", "k") == 0
        duplicate = stage.publish("work", "k")
        assert stage.succeeds(duplicate) == f"done by {victim.id}"
        assert stage.effects("k") == 1


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
