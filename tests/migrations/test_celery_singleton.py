"""celery-singleton: what it promised is kept, and what was wrong with it is not."""

from __future__ import annotations

import pytest

from tests.migrations.conftest import PATIENCE, Shop
from tests.support.waiting import wait_for

BEFORE, AFTER = "celery_singleton_before.sync", "celery_singleton_after.sync"
BOTH = pytest.mark.parametrize("name", [BEFORE, AFTER], ids=["before", "after"])


def locks(shop: Shop, task_id: str) -> list[int]:
    """Return for how many seconds celery-singleton locks something for this task; -1 is for ever."""
    return [
        int(shop.redis.ttl(name))
        for name in shop.redis.scan_iter("SINGLETONLOCK_*")
        if shop.redis.get(name) == task_id.encode()
    ]


class TestThePromise:
    @BOTH
    def test_a_duplicate_gets_the_result_of_the_running_task(self, shop: Shop, key: str, name: str):
        gate = shop.order("closed1", key)
        first = shop.task(name).delay(key)
        shop.started(key)
        again = shop.task(name).delay(key, full=True)
        assert again.id == first.id
        gate.unlink()
        assert again.get(timeout=PATIENCE) == first.get(timeout=PATIENCE)
        shop.passed()
        assert shop.starts(key) == 1

    @BOTH
    def test_after_the_end_the_next_call_runs(self, shop: Shop, key: str, name: str):
        first = shop.task(name).delay(key)
        first.get(timeout=PATIENCE)
        # celery-singleton unlocks after the result is there.
        wait_for(lambda: not locks(shop, first.id), PATIENCE, "the lock to go")
        second = shop.task(name).delay(key)
        assert second.id != first.id
        second.get(timeout=PATIENCE)
        assert shop.starts(key) == 2


class TestARetry:
    def test_was_lost(self, shop: Shop, key: str):
        shop.order("fail", key)
        first = shop.task(BEFORE).delay(key)
        wait_for(lambda: first.state == "RETRY", PATIENCE, "the retry")
        assert locks(shop, first.id) == [-1]
        wait_for(lambda: not shop.redis.exists("unacked"), PATIENCE, "all to be acknowledged")
        # Neither a message nor a countdown is left that could ever run it.
        assert shop.redis.llen("migrations") == 0
        assert shop.task(BEFORE).delay(key).id == first.id
        assert shop.starts(key) == 1

    def test_runs(self, shop: Shop, key: str):
        shop.order("fail", key)
        first = shop.task(AFTER).delay(key)
        wait_for(lambda: first.state == "RETRY", PATIENCE, "the retry")
        assert shop.task(AFTER).delay(key).id == first.id
        first.get(timeout=PATIENCE)
        assert (shop.starts(key), shop.ends(key)) == (2, 1)


class TestAKilledWorker:
    def test_blocked_the_key_for_ever(self, shop: Shop, key: str):
        shop.order("kill", key)
        first = shop.task(BEFORE).delay(key)
        wait_for(lambda: first.state == "FAILURE", PATIENCE, "the loss to be noticed")
        shop.passed()
        assert locks(shop, first.id) == [-1]
        assert shop.task(BEFORE).delay(key).id == first.id
        assert shop.starts(key) == 1
