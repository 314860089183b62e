"""celery-once: what it promised is kept, and what was wrong with it is not."""

from __future__ import annotations

import os
import signal

import pytest

from tests.migrations.conftest import LEASE, PATIENCE, Shop
from tests.support.waiting import wait_for
from tests.support.workers import freeze

BEFORE, AFTER = "celery_once_before.report", "celery_once_after.report"
BOTH = pytest.mark.parametrize("name", [BEFORE, AFTER], ids=["before", "after"])


def locked(shop: Shop, key: str) -> int:
    """Return the seconds that celery-once keeps this key for; -2 without a lock."""
    names = [name for name in shop.redis.scan_iter("qo_*") if key.encode() in name]
    return int(shop.redis.ttl(names[0])) if names else -2


def unlocked(shop: Shop, key: str) -> None:
    """Wait for the lock to go, which it does after the result is there."""
    wait_for(lambda: locked(shop, key) == -2, PATIENCE, "the lock to go")


class TestThePromise:
    @BOTH
    def test_a_call_that_is_at_work_is_not_published_again(self, shop: Shop, key: str, name: str):
        gate = shop.order("closed1", key)
        first = shop.task(name).delay(key, "now")
        shop.started(key)
        again = shop.task(name).delay(key, "later")
        assert again.id == (None if name == BEFORE else first.id)
        gate.unlink()
        first.get(timeout=PATIENCE)
        shop.passed()
        assert shop.starts(key) == 1

    @BOTH
    def test_a_call_that_waits_in_the_queue_is_not_published_again(
        self, shop: Shop, key: str, name: str
    ):
        first = shop.task(name).apply_async((key,), countdown=1)
        again = [shop.task(name).delay(key) for _ in range(3)]
        assert {each.id for each in again} == {None if name == BEFORE else first.id}
        first.get(timeout=PATIENCE)
        shop.passed()
        assert shop.starts(key) == 1

    @BOTH
    def test_after_the_end_the_next_call_runs(self, shop: Shop, key: str, name: str):
        results = set()
        for when in "abc":
            results.add(shop.task(name).delay(key, when).get(timeout=PATIENCE))
            unlocked(shop, key)
        assert len(results) == shop.starts(key) == 3

    @BOTH
    def test_after_a_failure_the_next_call_runs(self, shop: Shop, key: str, name: str):
        shop.order("fail", key)
        shop.task(name).delay(key).get(timeout=PATIENCE, propagate=False)
        unlocked(shop, key)
        shop.task(name).delay(key).get(timeout=PATIENCE)
        assert shop.starts(key) == 2


class TestAKilledWorker:
    def test_blocked_the_key_for_an_hour(self, shop: Shop, key: str):
        shop.order("kill", key)
        lost = shop.task(BEFORE).delay(key)
        wait_for(lambda: lost.state == "FAILURE", PATIENCE, "the loss to be noticed")
        assert shop.task(BEFORE).delay(key).id is None
        assert locked(shop, key) > 3500
        assert shop.starts(key) == 1


class TestALateWorker:
    def test_released_the_key_of_the_next_run(self, shop: Shop, key: str):
        first_gate = shop.order("closed1", key)
        second_gate = shop.order("closed2", key)
        shop.order("closed3", key)
        first = shop.task(BEFORE).apply_async((key,), once={"timeout": 1})
        shop.started(key)
        unlocked(shop, key)
        shop.task(BEFORE).delay(key)
        shop.started(key, 2)
        assert locked(shop, key) > 3500
        first_gate.unlink()
        first.get(timeout=PATIENCE)
        unlocked(shop, key)
        shop.task(BEFORE).delay(key)
        shop.started(key, 3)  # beside the second
        assert second_gate.exists()
        assert shop.ends(key) == 1

    def test_cannot_give_back_what_is_no_longer_its_own(self, shop: Shop, key: str):
        task = shop.task(AFTER)
        first_gate, second_gate = shop.order("closed1", key), shop.order("closed2", key)
        first = task.delay(key)
        shop.started(key)
        (entry,) = shop.ledger.entries("start", key)
        freeze(entry.pid)
        try:
            # By name: it is for the worker to say that the lease has run out.
            second = shop.app.send_task(AFTER, (key,))
            shop.started(key, 2)
        finally:
            os.kill(entry.pid, signal.SIGCONT)
        first_gate.unlink()
        wait_for(lambda: shop.ends(key) == 1, PATIENCE, "the late one to end")
        holder = task.idempotency_record(key)
        assert holder is not None
        assert holder.task_id == second.id
        assert task.delay(key).id == second.id
        shop.passed()
        assert shop.starts(key) == 2
        second_gate.unlink()
        second.get(timeout=PATIENCE)
        assert first.get(timeout=PATIENCE)

    def test_is_not_late_because_it_works_for_long(self, shop: Shop, key: str):
        gate = shop.order("closed1", key)
        first = shop.task(AFTER).delay(key)
        shop.started(key)
        began = shop.redis.time()[0]
        task = shop.task(AFTER)
        wait_for(lambda: shop.redis.time()[0] - began > 1.5 * LEASE, PATIENCE, "more than a lease")
        assert task.delay(key).id == first.id
        gate.unlink()
        first.get(timeout=PATIENCE)
        assert shop.starts(key) == 1
