"""Options about keys and records: what each does on a real worker."""

from __future__ import annotations

import time

import pytest

from celery_idempotent.errors import FingerprintMismatch, ResultUnavailable
from celery_idempotent.records import State
from tests.policies.conftest import PATIENCE, Site
from tests.support.waiting import wait_for


def gone(site: Site, name: str, key: str) -> None:
    wait_for(lambda: site.record(name, key) is None, PATIENCE, "the end of the retention")


class TestScope:
    def test_each_tenant_has_keys_of_its_own(self, on_redis: Site, key: str):
        first = on_redis.publish("scoped", key, "acme").get(timeout=PATIENCE)
        other = on_redis.publish("scoped", key, "emca").get(timeout=PATIENCE)
        again = on_redis.app.send_task("scoped", (key,), {"tenant": "acme"})
        assert (first["tenant"], other["tenant"]) == ("acme", "emca")
        assert again.get(timeout=PATIENCE) == first
        assert on_redis.ledger.count("start", key) == 2


class TestNamespace:
    def test_tasks_of_one_namespace_share_their_keys(self, on_redis: Site, key: str):
        red = on_redis.publish("red", key).get(timeout=PATIENCE)
        assert on_redis.publish("blue", key).get(timeout=PATIENCE) == red
        assert on_redis.ledger.count("start", key) == 1


class TestFingerprint:
    def test_only_the_named_arguments_must_be_equal(self, on_redis: Site, key: str):
        task = on_redis.app.tasks["by_name"]
        first = task.delay(key, 1, 2, note="a").get(timeout=PATIENCE)
        assert task.delay(key, 1, 2, note="b").get(timeout=PATIENCE) == first
        with pytest.raises(FingerprintMismatch):
            task.delay(key, 1, 3, note="a").get(timeout=PATIENCE)
        assert on_redis.ledger.count("start", key) == 1


class TestRetention:
    def test_after_it_the_key_is_new(self, on_redis: Site, key: str):
        first = on_redis.publish("forgetful", key).get(timeout=PATIENCE)
        assert on_redis.publish("forgetful", key).get(timeout=PATIENCE) == first
        gone(on_redis, "forgetful", key)
        assert on_redis.publish("forgetful", key).get(timeout=PATIENCE) != first
        assert on_redis.ledger.count("start", key) == 2

    def test_of_nothing_lets_the_next_call_run_but_no_redelivery(self, on_redis: Site, key: str):
        first = on_redis.publish("exclusive", key)
        values = {first.get(timeout=PATIENCE)["run"]}
        on_redis.deliver_again(on_redis.receipt(first.id))
        on_redis.idle(key)
        assert on_redis.ledger.count("start", key) == 1
        for _ in range(2):
            values.add(on_redis.publish("exclusive", key).get(timeout=PATIENCE)["run"])
        assert len(values) == on_redis.ledger.count("start", key) == 3


class TestStoreResult:
    def test_without_it_the_value_is_where_celery_left_it(self, on_redis: Site, key: str):
        first = on_redis.publish("unstored", key)
        value = first.get(timeout=PATIENCE)
        record = on_redis.record("unstored", key)
        assert record is not None
        assert (record.state, record.value) == (State.COMPLETED, None)
        assert on_redis.publish("unstored", key).get(timeout=PATIENCE) == value
        first.forget()
        wait_for(
            lambda: time.time() * 1000 - record.updated_ms > 600, PATIENCE, "more than a lease"
        )
        with pytest.raises(ResultUnavailable):
            on_redis.publish("unstored", key).get(timeout=PATIENCE)
        assert on_redis.ledger.count("start", key) == 1


class TestAtomic:
    def test_no_worker_starts_on_a_store_without_transactions(self, open_site):
        site = open_site("redis", with_an_atomic_task=True)
        worker = site.worker(ready=False)
        assert worker.wait(60) != 0
        assert "is atomic" in worker.log
