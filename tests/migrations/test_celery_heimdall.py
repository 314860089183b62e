"""celery-heimdall: what it promised is kept, and what was wrong with it is not."""

from __future__ import annotations

import pytest

from tests.migrations.conftest import PATIENCE, Shop
from tests.support.waiting import wait_for

BEFORE, AFTER = "celery_heimdall_before", "celery_heimdall_after"
BOTH = pytest.mark.parametrize("module", [BEFORE, AFTER], ids=["before", "after"])


def locked(shop: Shop, key: str) -> bool:
    return bool(shop.redis.exists(f"h-lock:report-{key}"))


class TestThePromise:
    @BOTH
    def test_a_duplicate_gets_the_result_of_the_running_task(
        self, shop: Shop, key: str, module: str
    ):
        task = shop.task(f"{module}.report")
        gate = shop.order("closed1", key)
        first = task.delay(key, "may")
        shop.started(key)
        assert task.delay(key, "june").id == first.id
        gate.unlink()
        first.get(timeout=PATIENCE)
        shop.passed()
        assert shop.starts(key) == 1

    @BOTH
    def test_after_the_end_the_next_call_runs(self, shop: Shop, key: str, module: str):
        task = shop.task(f"{module}.report")
        first = task.delay(key)
        first.get(timeout=PATIENCE)
        wait_for(lambda: not locked(shop, key), PATIENCE, "the lock to go")
        second = task.delay(key, "june")
        assert second.id != first.id
        second.get(timeout=PATIENCE)
        assert shop.starts(key) == 2

    @BOTH
    def test_a_key_may_be_remembered_after_the_end(self, shop: Shop, key: str, module: str):
        task = shop.task(f"{module}.remind")
        first = task.delay(key)
        value = first.get(timeout=PATIENCE)
        again = task.delay(key)
        assert again.id == first.id
        assert again.get(timeout=PATIENCE) == value
        shop.passed()
        assert shop.starts(key) == 1


class TestADuplicateByName:
    def test_freed_the_key_of_the_task_at_work(self, shop: Shop, key: str):
        name = f"{BEFORE}.report"
        shop.order("closed1", key)
        shop.app.send_task(name, (key,))
        shop.started(key)
        shop.order("closed2", key)
        skipped = shop.app.send_task(name, (key,))
        assert skipped.get(timeout=PATIENCE) is None  # a success that never was
        wait_for(lambda: not locked(shop, key), PATIENCE, "the lock to go")
        shop.app.send_task(name, (key,))
        shop.started(key, 2)
        assert shop.ends(key) == 0

    def test_waits_its_turn(self, shop: Shop, key: str):
        name = f"{AFTER}.report"
        gate = shop.order("closed1", key)
        first = shop.app.send_task(name, (key,))
        shop.started(key)
        others = [shop.app.send_task(name, (key,)) for _ in range(2)]
        shop.passed()
        holder = shop.task(name).idempotency_record(key)
        assert holder is not None
        assert holder.task_id == first.id
        assert shop.starts(key) == 1
        gate.unlink()
        results = {each.get(timeout=PATIENCE) for each in (first, *others)}
        assert len(results) == 3
        runs = sorted(shop.ledger.entries(key=key), key=lambda entry: entry.time)
        assert [entry.phase for entry in runs] == ["start", "end"] * 3  # one after the other

    def test_of_a_key_that_is_remembered_gets_the_value(self, shop: Shop, key: str):
        name = f"{AFTER}.remind"
        value = shop.task(name).delay(key).get(timeout=PATIENCE)
        assert shop.app.send_task(name, (key,)).get(timeout=PATIENCE) == value
