"""Steps: a payment with two providers that is killed at every line, and what each provider saw."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from celery_idempotent.records import State
from tests.policies.conftest import PATIENCE, Site
from tests.support.waiting import wait_for

#: Where the process dies, and how often each provider is called then: the only gap is between an effect and its record.
LINES = {
    "at the start": (1, 1),
    "before charge": (1, 1),
    "after charge": (2, 1),
    "between": (1, 1),
    "before ship": (1, 1),
    "after ship": (1, 2),
    "at the end": (1, 1),
    "settled": (1, 1),
}


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


def check(site: Site, key: str, value: Any, charges: int = 1, ships: int = 1) -> None:
    """Each effect has one key however often it was asked for, and each run of the body got the same results."""
    called = calls(site, key)
    assert [len(called["charge"]), len(called["ship"])] == [1, 1]
    assert [called["charge"].total(), called["ship"].total()] == [charges, ships]
    assert set(called["charge"]).isdisjoint(called["ship"])
    for phase, each in zip(("charged", "shipped"), value, strict=True):
        found = seen(site, phase, key)
        assert found
        assert found == [each] * len(found)


@pytest.fixture(scope="module")
def killed(on_redis: Site) -> dict[str, tuple[str, Any]]:
    """A payment for each line, all at once: its key and its result."""
    killed = {}
    for line in LINES:
        key = f"killed {line} {id(on_redis)}"
        on_redis.crash(line, key)
        killed[line] = (key, on_redis.publish("purchase", key))
    return killed


class TestKilled:
    @pytest.mark.parametrize(("line", "expected"), LINES.items(), ids=LINES)
    def test_a_payment_survives_a_kill(self, on_redis, killed, line, expected):
        key, result = killed[line]
        value = result.get(timeout=2 * PATIENCE)
        assert on_redis.ledger.count("crash", f"{line} {key}") == 1
        check(on_redis, key, value, *expected)

    @pytest.mark.rabbitmq
    def test_on_rabbitmq_too(self, on_rabbitmq, key):
        on_rabbitmq.crash("between", key)
        value = on_rabbitmq.publish("purchase", key).get(timeout=PATIENCE)
        assert on_rabbitmq.ledger.count("crash", f"between {key}") == 1
        check(on_rabbitmq, key, value)


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


class TestUnguarded:
    def test_an_observed_duplicate_runs_its_steps(self, on_redis, key):
        """It changes nothing that it runs without a claim."""
        task = on_redis.app.tasks["purchase_observed"]
        first = task.delay(key).get(timeout=PATIENCE)
        second = task.delay(key).get(timeout=PATIENCE)
        assert first != second
        called = calls(on_redis, key)
        assert {name: each.total() for name, each in called.items()} == {"charge": 2, "ship": 2}
        # The same key for the provider, which can tell.
        assert [len(called["charge"]), len(called["ship"])] == [1, 1]
        wait_for(lambda: on_redis.ledger.count("observed replayed") >= 1, PATIENCE)

    def test_steps_of_a_task_that_is_switched_off_just_run(self, on_redis, key):
        value = on_redis.publish("purchase_off", key).get(timeout=PATIENCE)
        check(on_redis, key, value)
