"""Options about keys and records: what each does on a real worker."""

from __future__ import annotations

import time

import pytest

from celery_idempotent.errors import FingerprintMismatch, KeyMissing, ResultUnavailable
from celery_idempotent.records import State
from tests.policies.app import Refused
from tests.policies.conftest import PATIENCE, Site
from tests.support.sites import Gate
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

    def test_a_call_may_give_its_scope_and_its_key(self, on_redis: Site, key: str):
        given = [("a", key), ("b", key), ("a", f"{key}.2")]
        values = [
            on_redis.publish("work", key, idempotency_scope=scope, idempotency_key=each)
            for scope, each in given
        ]
        first, *others = [each.get(timeout=PATIENCE) for each in values]
        assert first not in others
        again = on_redis.publish("work", key, idempotency_scope="a")
        assert again.get(timeout=PATIENCE) == first
        assert on_redis.ledger.count("start", key) == 3


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


class TestMissingKeys:
    def test_a_call_whose_rule_finds_nothing_is_not_published(self, on_redis: Site, key: str):
        with pytest.raises(KeyMissing, match="by_number"):
            on_redis.app.tasks["by_number"].delay(key)
        assert on_redis.ledger.count("start", key) == 0

    def test_a_message_whose_rule_finds_nothing_does_not_run(self, on_redis: Site, key: str):
        with pytest.raises(KeyMissing):
            on_redis.app.send_task("by_number", (key,)).get(timeout=PATIENCE)
        assert on_redis.ledger.count("start", key) == 0


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

    def test_of_nothing_lets_duplicates_run_one_after_the_other(
        self, on_redis: Site, key: str, gate: Gate
    ):
        sent = [on_redis.publish("exclusive", key, gate.path) for _ in range(3)]
        on_redis.noted("conflicted", key)
        on_redis.noted("start", key)  # a duplicate may be refused before the holder wrote this down
        assert on_redis.ledger.count("start", key) == 1
        gate.open()
        assert len({each.get(timeout=PATIENCE)["run"] for each in sent}) == 3
        order = [e.phase for e in on_redis.ledger.entries(key=key) if e.phase in ("start", "end")]
        assert order == ["start", "end"] * 3


class TestRetentionOfFailures:
    def test_a_failure_is_kept_for_as_long_as_a_success(self, on_redis: Site, key: str):
        for _ in range(2):
            with pytest.raises(Refused):
                on_redis.publish("forgiving", key).get(timeout=PATIENCE)
        assert on_redis.effects(key)[key] == 1
        gone(on_redis, "forgiving", key)
        with pytest.raises(Refused):
            on_redis.publish("forgiving", key).get(timeout=PATIENCE)
        assert on_redis.effects(key)[key] == 2


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


class TestFusedResult:
    @pytest.mark.parametrize(("name", "by"), [("work", "lua"), ("apart", "tcp")])
    def test_the_result_is_stored_by_the_settle_or_by_celery(
        self, on_redis: Site, key: str, name: str, by: str
    ):
        with on_redis.redis.monitor() as monitor:
            result = on_redis.publish(name, key)
            assert result.get(timeout=PATIENCE)["run"]
            while True:
                said = monitor.next_command()
                words = said["command"]
                if result.id in words and "SETEX" in words and "SUCCESS" in words:
                    break
        assert said["client_type"] == by


class TestAtomic:
    def test_no_worker_starts_on_a_store_without_transactions(self, open_site):
        site = open_site("redis", with_an_atomic_task=True)
        worker = site.worker(ready=False)
        assert worker.wait(60) != 0
        assert "is atomic" in worker.log
