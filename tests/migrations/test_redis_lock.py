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
