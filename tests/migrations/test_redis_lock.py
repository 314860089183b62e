"""A lock of one's own: what it promised is kept, and what was wrong with it is not."""

from __future__ import annotations

import pytest

from tests.migrations.conftest import LEASE, PATIENCE, Shop
from tests.support.waiting import wait_for

BEFORE, AFTER = "redis_lock_before.sync", "redis_lock_after.sync"
BOTH = pytest.mark.parametrize("name", [BEFORE, AFTER], ids=["before", "after"])


class TestThePromise:
    @BOTH
    def test_a_duplicate_is_dropped_while_the_first_is_at_work(
        self, shop: Shop, key: str, name: str
    ):
        gate = shop.order("closed1", key)
        first = shop.task(name).delay(key)
        shop.started(key)
        again = shop.task(name).delay(key)
        done = "SUCCESS" if name == BEFORE else "IGNORED"
        wait_for(lambda: again.state == done, PATIENCE, "the duplicate to end")
        gate.unlink()
        first.get(timeout=PATIENCE)
        assert shop.starts(key) == 1

    @BOTH
    def test_after_the_end_the_next_call_runs(self, shop: Shop, key: str, name: str):
        results = [shop.task(name).delay(key).get(timeout=PATIENCE) for _ in range(2)]
        assert len(set(results)) == shop.starts(key) == 2


class TestWorkThatTakesLonger:
    def test_let_a_second_and_then_a_third_run_in(self, shop: Shop, key: str):
        first_gate = shop.order("closed1", key)
        for run in (2, 3):
            shop.order(f"closed{run}", key)
        task = shop.task(BEFORE)
        first = task.delay(key)
        shop.started(key)
        lock = f"lock-sync-{key}"
        shop.redis.expire(lock, 1)  # instead of a minute
        wait_for(lambda: not shop.redis.exists(lock), PATIENCE, "the lock to run out")
        task.delay(key)
        shop.started(key, 2)
        assert shop.redis.ttl(lock) > 50
        first_gate.unlink()
        first.get(timeout=PATIENCE)
        assert not shop.redis.exists(lock)
        task.delay(key)
        shop.started(key, 3)
        assert shop.ends(key) == 1

    def test_keeps_its_key(self, shop: Shop, key: str):
        task = shop.task(AFTER)
        gate = shop.order("closed1", key)
        first = task.delay(key)
        shop.started(key)
        began = shop.redis.time()[0]
        wait_for(lambda: shop.redis.time()[0] - began > 1.5 * LEASE, PATIENCE, "more than a lease")
        again = task.delay(key)
        wait_for(lambda: again.state == "IGNORED", PATIENCE, "the duplicate to be dropped")
        gate.unlink()
        first.get(timeout=PATIENCE)
        assert shop.starts(key) == 1


class TestAKilledWorker:
    def test_lost_its_message_to_its_own_lock(self, shop: Shop, key: str):
        shop.order("kill", key)
        first = shop.task(BEFORE).delay(key)
        assert first.get(timeout=PATIENCE) is None
        assert first.state == "SUCCESS"
        assert (shop.starts(key), shop.ends(key)) == (1, 0)
        # And for the rest of the minute nobody else does it.
        assert shop.task(BEFORE).delay(key).get(timeout=PATIENCE) is None
        assert shop.starts(key) == 1

    def test_is_followed_by_another_run(self, shop: Shop, key: str):
        shop.order("kill", key)
        first = shop.task(AFTER).delay(key)
        assert first.get(timeout=PATIENCE)
        assert (shop.starts(key), shop.ends(key)) == (2, 1)


class TestARedelivery:
    def test_after_the_end_ran_again(self, shop: Shop, key: str):
        message = shop.take(shop.task(BEFORE), key)
        for times in (1, 2):
            shop.deliver(message)
            shop.started(key, times)
            wait_for(lambda: not shop.redis.exists(f"lock-sync-{key}"), PATIENCE, "the end")

    def test_does_not_run(self, shop: Shop, key: str):
        message = shop.take(shop.task(AFTER), key)
        shop.deliver(message).get(timeout=PATIENCE)
        shop.deliver(message)
        shop.passed()
        assert shop.starts(key) == 1


class TestTheDeploy:
    def test_a_new_worker_runs_old_messages_once(self, shop: Shop, key: str):
        message = shop.take(shop.task(BEFORE), key)
        gate = shop.order("closed1", key)
        first = shop.deliver(message, task=AFTER)
        shop.started(key)
        again = shop.task(AFTER).delay(key)
        wait_for(lambda: again.state == "IGNORED", PATIENCE, "the duplicate to be dropped")
        gate.unlink()
        first.get(timeout=PATIENCE)
        assert shop.starts(key) == 1
