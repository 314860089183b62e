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
from tests.support.workers import Worker, alive

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]
Digests = dict[str, bytes]


def strike(worker: Worker, child: int, number: signal.Signals, *, healed: Proxy) -> None:
    """Let the signal be the first thing that the child meets in a world that is whole again."""
    worker.freeze(child)
    healed.heal()
    os.kill(child, number)
    worker.thaw(child)


class TestInTheSettle:
    """The effect happened, and its settle does not get through: nothing may release the key."""

    def stuck(self, stage: Stage, proxy: Proxy, digests: Digests) -> tuple[AsyncResult[str], int]:
        result = stage.send("work", "k", "", "gate")
        child = stage.started("k")
        proxy.lose_requests(digests["settle"], times=None)
        stage.open("gate")
        wait_for(lambda: proxy.lost, what="a settle to be lost on its way")
        assert stage.effects("k") == 1
        assert stage.state("k") is State.PROCESSING
        return result, child

    def test_a_soft_limit_does_not_end_its_trying(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        worker = stage.worker()
        result, child = self.stuck(stage, redis_proxy, digests)
        os.kill(child, signal.SIGUSR1)
        lost = redis_proxy.lost
        wait_for(lambda: redis_proxy.lost > lost + 2, what="more tries")
        assert stage.state("k") is State.PROCESSING
        assert result.state == "PENDING"
        redis_proxy.heal()
        stage.ran_once("k", result)
        stage.tells("settled", "k")
        assert stage.told("released", "k") == 0
        assert worker.children() == [child]

    def test_a_termination_leaves_it_a_last_try(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        worker = stage.worker()
        result, child = self.stuck(stage, redis_proxy, digests)
        strike(worker, child, signal.SIGTERM, healed=redis_proxy)
        wait_for(lambda: not alive(child), what="the child to end")
        assert stage.state("k") is State.COMPLETED
        # The message is not acknowledged: its redelivery replays.
        stage.ran_once("k", result)
        assert stage.starts("k") == 1
        assert stage.told("released", "k") == stage.told("interrupted", "k") == 0

    def test_a_termination_whose_last_try_fails_leaves_the_record_never_releases_it(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        stage.worker()
        result, child = self.stuck(stage, redis_proxy, digests)
        before = stage.record("k")
        assert before is not None
        os.kill(child, signal.SIGTERM)
        wait_for(lambda: not alive(child), what="the child to end")
        # Its main process interrupts the claim, the redelivery takes it over.
        stage.started("k", times=2)
        redis_proxy.heal()
        stage.succeeds(result)
        after = stage.record("k")
        assert after is not None
        assert (after.created_ms, after.attempts, after.crashes) == (before.created_ms, 2, 1)
        assert stage.told("released", "k") == 0
        stage.tells("interrupted", "k")

    def test_a_cold_shutdown_leaves_it_a_last_try(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        worker = stage.worker()
        result, child = self.stuck(stage, redis_proxy, digests)
        worker.freeze(child)
        redis_proxy.heal()
        worker.send_signal(signal.SIGQUIT)
        # What Celery says before it ends its children; from 5.5 on "Cold shutdown" comes after.
        says = "Hitting Ctrl+C again" if celery.VERSION[:2] >= (5, 5) else "Cold shutdown"
        wait_for(lambda: says in worker.log, what="the shutdown")
        worker.thaw(child)
        worker.wait()
        assert stage.state("k") is State.COMPLETED
        worker.start()
        stage.ran_once("k", result)
        assert stage.starts("k") == 1
        assert stage.told("released", "k") == stage.told("interrupted", "k") == 0

    def test_a_warm_shutdown_waits_for_it(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        worker = stage.worker()
        result, _ = self.stuck(stage, redis_proxy, digests)
        worker.send_signal(signal.SIGTERM)
        wait_for(lambda: "Warm shutdown" in worker.log, what="the shutdown")
        lost = redis_proxy.lost
        wait_for(lambda: redis_proxy.lost > lost, what="another try")
        redis_proxy.heal()
        assert worker.wait() == 0
        assert stage.succeeds(result) == f"done by {result.id}"
        assert stage.state("k") is State.COMPLETED
        assert stage.queued() == 0
        stage.tells("settled", "k")

    def test_a_hard_limit_after_it_was_written_interrupts_nothing(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage(store=f"{redis_proxy.url()}?socket_timeout=60")
        worker = stage.worker()
        late = stage.send("work", "k", "", "gate", time_limit=3)
        child = stage.started("k")
        redis_proxy.swallow_replies(digests["settle"], times=None, silent=True)
        stage.open("gate")
        wait_for(lambda: redis_proxy.swallowed, what="the settle to be written")
        settled = stage.record("k")
        wait_for(lambda: f"Hard time limit (3s) exceeded for work[{late.id}]" in worker.log)
        wait_for(lambda: not alive(child), what="the child to be killed")
        assert type(stage.fails(late)).__name__ == "TimeLimitExceeded"
        redis_proxy.heal()
        duplicate = stage.send("work", "k")
        assert stage.succeeds(duplicate) == f"done by {late.id}"
        assert stage.record("k") == settled
        assert stage.starts("k") == 1
        assert stage.told("interrupted", "k") == 0


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
        result = stage.send("work", "k")
        wait_for(lambda: redis_proxy.swallowed, what="the claim to be executed")
        assert stage.state("k") is State.PROCESSING
        os.kill(child, number)
        if number is signal.SIGUSR1:
            assert type(stage.fails(result)).__name__ == "SoftTimeLimitExceeded"
            assert stage.record("k") is None
            assert stage.starts("k") == 0
            result = stage.send("work", "k")
        stage.ran_once("k", result)
        record = stage.record("k")
        assert record is not None
        assert (record.attempts, record.crashes, stage.starts("k")) == (1, 0, 1)

    def test_one_that_strikes_between_two_tries_frees_the_key(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        worker = stage.worker()
        (child,) = worker.children()
        # Two connections a try; after the third try it waits for some 0.2 s.
        redis_proxy.swallow_replies(digests["claim"], times=None)
        result = stage.send("work", "k")
        wait_for(lambda: redis_proxy.swallowed >= 6, what="three tries", interval=0.005)
        strike(worker, child, signal.SIGUSR1, healed=redis_proxy)
        assert type(stage.fails(result)).__name__ == "SoftTimeLimitExceeded"
        assert stage.starts("k") == 0
        assert stage.record("k") is None
        stage.ran_once("k", stage.send("work", "k"))


class TestInTheRelease:
    """The run failed, and its release does not get through: the key is free when the store is back."""

    def test_a_failure_stays_what_it_is_and_the_key_is_released_later(
        self, set_stage: SetStage, redis_proxy: Proxy
    ):
        stage = set_stage()
        worker = stage.worker()
        failed = stage.send("work", "k", "fails once", "gate")
        stage.started("k")
        redis_proxy.refuse()
        stage.open("gate")
        wait_for(lambda: "could not release work key k" in worker.log, what="it to give up")
        assert repr(stage.fails(failed)) == "ValueError('k')"
        assert stage.state("k") is State.PROCESSING
        redis_proxy.heal()
        stage.ran_once("k", stage.send("work", "k"))
        assert (stage.starts("k"), stage.record("k").crashes) == (2, 0)

    def test_a_retry_waits_for_the_release_of_its_predecessor(
        self, set_stage: SetStage, redis_proxy: Proxy
    ):
        stage = set_stage()
        worker = stage.worker()
        result = stage.send("work", "k", "retries once", "gate")
        stage.started("k")
        redis_proxy.refuse()
        stage.open("gate")
        wait_for(lambda: "could not release work key k" in worker.log, what="it to give up")
        redis_proxy.heal()
        stage.ran_once("k", result)
        assert stage.starts("k") == 2
        assert stage.ledger.count("retries 1", "k") == 1

    def test_one_that_strikes_between_two_tries_frees_the_key(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        worker = stage.worker()
        failed = stage.send("work", "k", "fails once", "gate")
        child = stage.started("k")
        redis_proxy.lose_requests(digests["release"], times=None)
        stage.open("gate")
        wait_for(lambda: redis_proxy.lost >= 6, what="three tries", interval=0.005)
        strike(worker, child, signal.SIGUSR1, healed=redis_proxy)
        stage.fails(failed)
        assert stage.record("k") is None
        stage.ran_once("k", stage.send("work", "k"))
        assert stage.starts("k") == 2

    def test_a_termination_does_not_wait_for_the_store(
        self, set_stage: SetStage, redis_proxy: Proxy, digests: Digests
    ):
        stage = set_stage()
        stage.worker()
        result = stage.send("work", "k", "hangs once")
        child = stage.started("k")
        redis_proxy.lose_requests(digests["release"], times=None)
        os.kill(child, signal.SIGTERM)
        wait_for(lambda: not alive(child), 2, "the child to end")
        assert redis_proxy.lost == 2  # one try, and the second connection that it may take
        # Its main process frees the key.
        stage.ran_once("k", result)
        stage.tells("interrupted", "k")
        assert stage.starts("k") == 2


class TestAfterTheBody:
    """The task is done: a soft limit fails nothing any more, and is the limit of no other task."""

    @pytest.mark.parametrize("linked", [False, True], ids=["it stores", "it sends"])
    def test_one_that_strikes_while_celery_is_busy_with_it_fails_nothing(
        self, set_stage: SetStage, linked: bool
    ):
        stage = set_stage()
        worker = stage.worker()
        (child,) = worker.children()
        hold = stage.client.tasks["hold"]
        result = stage.send("struck", "k", 2, link=hold.s() if linked else None)
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
        assert stage.succeeds(stage.send("calls", "k", task, 1)) == "limited"
        assert stage.effects("inner k") == effects
        assert stage.state("inner k", task) is state
