"""Limits and signals that strike outside run(): in the claim, in the settle, in the release."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

import celery
import pytest
from celery.result import AsyncResult

from celery_idempotent.records import State
from tests.faults.conftest import Stage
from tests.support.proxy import Proxy
from tests.support.waiting import wait_for
from tests.support.workers import alive

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]
Digests = dict[str, bytes]


class TestInTheSettle:
    """The effect happened, and its settle does not get through: nothing may release the key."""

    def stuck(self, stage: Stage, proxy: Proxy, digests: Digests) -> tuple[AsyncResult[str], int]:
        result = stage.publish("work", "k", "", "gate")
        child = stage.started("k")
        proxy.lose_requests(digests["settle"], times=None)
        stage.open("gate")
        wait_for(lambda: proxy.lost, what="a settle to be lost on its way")
        assert stage.effects("k") == 1
        assert stage.state("k") is State.PROCESSING
        return result, child

    @pytest.mark.parametrize("whole", [False, True], ids=["its child", "the worker"])
    def test_a_termination_leaves_it_a_last_try(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests, whole: bool
    ):
        """A child that is told to end, and a cold shutdown."""
        stage = set_stage()
        worker = stage.worker()
        result, child = self.stuck(stage, redis_proxy, digests)
        worker.freeze(child)
        redis_proxy.heal()
        if whole:
            worker.send_signal(signal.SIGQUIT)
            # What Celery says before it ends its children; from 5.5 on "Cold shutdown" comes after.
            says = "Hitting Ctrl+C again" if celery.VERSION[:2] >= (5, 5) else "Cold shutdown"
            stage.says(worker, says)
        else:
            os.kill(child, signal.SIGTERM)
        worker.thaw(child)
        wait_for(lambda: not alive(child), what="the child to end")
        assert stage.state("k") is State.COMPLETED
        if whole:
            worker.wait()
            worker.start()
        # The message is not acknowledged: its redelivery replays.
        stage.ran_once("k", result)
        assert stage.starts("k") == 1
        assert stage.told("released", "k") == stage.told("interrupted", "k") == 0


class TestInTheClaim:
    """The key may be ours by now, or not: nothing ran, so it is given back."""

    @pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
    def test_one_that_strikes_while_the_answer_is_on_its_way_frees_the_key(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests, number: signal.Signals
    ):
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


class TestInTheRelease:
    """The run failed, and its release does not get through: the key is free when the store is back."""

    @pytest.mark.parametrize("how", ["fails once", "retries once"])
    def test_a_failure_and_a_retry_stay_what_they_are_and_the_key_is_released_later(
        self, set_stage: SetStage, redis_proxy: Proxy, how: str
    ):
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


class TestAfterTheBody:
    """The task is done: a soft limit fails nothing any more, and is the limit of no other task."""

    @pytest.mark.parametrize("linked", [False, True], ids=["it stores", "it sends"])
    def test_one_that_strikes_while_celery_is_busy_with_it_fails_nothing(
        self, set_stage: SetStage, linked: bool
    ):
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
    def test_one_that_strikes_around_the_body_of_an_eager_call_is_raised_in_its_caller(
        self, set_stage: SetStage, task: str, effects: int, state: State | None
    ):
        stage = set_stage()
        stage.worker()
        assert stage.succeeds(stage.publish("calls", "k", task, 1)) == "limited"
        assert stage.effects("inner k") == effects
        assert stage.state("inner k", task) is state
