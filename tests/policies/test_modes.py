"""``idempotency_on_store_error="open"`` and ``idempotency_mode``: where nothing may be refused."""

from __future__ import annotations

import pytest

from tests.policies.conftest import PATIENCE, Site
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for

#: A port where nothing listens.
_NOWHERE = "redis://127.0.0.1:1/0"


def stored_keys(site: Site, text: str) -> list[bytes]:
    """Return the store's keys about this text, whatever their layout."""
    keys = site.redis.scan_iter(match="idem:*", count=10_000, _type="STRING")
    return [each for each in keys if text.encode() in each + (site.redis.get(each) or b"")]


class TestOpen:
    def test_a_task_runs_without_protection_and_says_so(self, open_site, key):
        site = open_site("redis", idempotency_store=_NOWHERE, idempotency_on_store_error="open")
        worker = site.worker(concurrency=5)
        retrying = site.app.send_task("once_retrying", args=(f"{key}.retry",))
        by_attribute = [site.publish("open", key) for _ in range(2)]
        by_setting = site.publish("work", key)
        with_steps = site.publish("purchase", key)
        values = [each.get(timeout=PATIENCE)["run"] for each in (*by_attribute, by_setting)]
        assert len(set(values)) == 3
        charged, shipped = with_steps.get(timeout=PATIENCE)
        assert charged["receipt"] != shipped["receipt"]
        assert site.ledger.count("start", key) == 3
        ids = [each.id for each in (*by_attribute, by_setting, with_steps)]
        told = [e.task_id for e in site.ledger.entries("store_failed") if e.task_id in ids]
        assert sorted(told) == sorted(ids)
        # A retry is published all the same, and runs.
        assert retrying.get(timeout=PATIENCE)
        assert site.ledger.count("start", f"{key}.retry") == 2
        assert site.ledger.count("wrong sender") == 0
        for task_id in ids:
            assert site.received(task_id) == 1
            said = [x for x in worker.log.splitlines() if task_id in x and "WARNING" in x]
            assert any("runs without protection" in line for line in said), said

    def test_it_is_protected_again_once_the_store_is_back(
        self, open_site, redis_proxy, private_redis: EmbeddedRedis, key
    ):
        site = open_site("redis", idempotency_store=redis_proxy.url())
        site.worker(concurrency=2)
        redis_proxy.refuse()
        first = site.publish("open", key).get(timeout=PATIENCE)
        redis_proxy.heal()
        second, third = (site.publish("open", key).get(timeout=PATIENCE) for _ in range(2))
        assert first != second == third
        assert site.ledger.count("start", key) == 2


class TestObserve:
    @pytest.fixture(autouse=True)
    def _sender(self, on_redis):
        yield
        assert on_redis.ledger.count("wrong sender") == 0

    def said(self, site: Site, task_id: str) -> str:
        """Return what the log says about a would-be duplicate."""
        from tests.support.sites import SHARED_WORKERS

        def found() -> list[str]:
            text = "".join(each.log for each in SHARED_WORKERS)
            return [x for x in text.splitlines() if task_id in x and "observed:" in x]

        (line,) = wait_for(found, PATIENCE, "a line in the log")
        assert "WARNING" in line
        return line

    def test_a_duplicate_of_a_completed_key_runs_and_is_told(self, on_redis, key):
        first = on_redis.publish("observed", key)
        value = first.get(timeout=PATIENCE)
        second = on_redis.publish("observed", key)
        assert second.get(timeout=PATIENCE) != value
        assert on_redis.ledger.count("end", key) == 2
        on_redis.noted("observed replayed", task_id=second.id)
        line = self.said(on_redis, second.id)
        # Enough to find its cause: who, what, when.
        for word in (second.id, first.id, "observed", key, "COMPLETED", "been answered by"):
            assert word in line
        assert on_redis.ledger.count("replayed", task_id=second.id) == 0


class TestOff:
    def test_it_is_a_plain_celery_task(self, on_redis, key):
        values = [on_redis.publish("off", key).get(timeout=PATIENCE)["run"] for _ in range(2)]
        assert len(set(values)) == 2
        assert on_redis.ledger.count("end", key) == 2
        on_redis.idle(key)
        assert stored_keys(on_redis, key) == []
        for receipt in on_redis.receipts(key):
            assert not [name for name in receipt["headers"] if name.startswith("idempotency")]
