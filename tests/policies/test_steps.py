"""Steps of a payment with two providers over a retry and a failure; test_recipes.py kills one at each line."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from celery_idempotent.records import State
from tests.policies.conftest import PATIENCE, Site


def calls(site: Site, key: str) -> dict[str, Counter[str]]:
    """Return for each provider the keys that it was given, and how often."""
    return {
        name: Counter(
            each.key.removeprefix(f"{key}:")
            for each in site.ledger.entries(name)
            if each.key.startswith(f"{key}:")
        )
        for name in ("charge", "ship")
    }


def seen(site: Site, phase: str, key: str) -> list[Any]:
    """Return what the body got from a step, in each of its runs."""
    return [
        json.loads(each.key.removeprefix(f"{key}:"))
        for each in site.ledger.entries(phase)
        if each.key.startswith(f"{key}:")
    ]


def check(site: Site, key: str, value: Any) -> None:
    """Each effect has one key however often it was asked for, and each run of the body got the same results."""
    called = calls(site, key)
    assert [len(called["charge"]), len(called["ship"])] == [1, 1]
    assert [called["charge"].total(), called["ship"].total()] == [1, 1]
    assert set(called["charge"]).isdisjoint(called["ship"])
    for phase, each in zip(("charged", "shipped"), value, strict=True):
        found = seen(site, phase, key)
        assert found
        assert found == [each] * len(found)


class TestOtherwise:
    def test_a_retry_goes_on_where_its_predecessor_stopped(self, shared, key):
        value = shared.publish("purchase_retrying", key).get(timeout=PATIENCE)
        assert shared.ledger.count("between", key) == 2
        check(shared, key, value)

    def test_a_failure_keeps_its_steps_for_the_next_call(self, on_redis, key):
        first = on_redis.publish("purchase_failing", key)
        with pytest.raises(RuntimeError, match="not today"):
            first.get(timeout=PATIENCE)
        record = on_redis.record("purchase_failing", key)
        assert record is not None
        assert record.state is State.INTERRUPTED
        assert record.crashes == 0
        assert [name for name, _ in record.steps] == ["charge"]
        ttl = on_redis.redis.ttl(next(on_redis.redis.scan_iter(f"*{key}*", count=10_000), ""))
        assert ttl == -2 or ttl > 3600
        value = on_redis.publish("purchase_failing", key).get(timeout=PATIENCE)
        assert on_redis.ledger.count("between", key) == 2
        check(on_redis, key, value)
