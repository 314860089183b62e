"""``idempotency_on_conflict``: what becomes of a duplicate while the key is held."""

from __future__ import annotations

import pytest

from tests.support.waiting import wait_for

PATIENCE = 30
EITHER_ACKS = pytest.mark.parametrize("acks", ["", "_early"], ids=["late", "early"])


@pytest.fixture(autouse=True)
def _nothing_is_left(shared, key):
    yield
    assert shared.ledger.count("wrong sender") == 0


@EITHER_ACKS
class TestWait:
    def test_a_duplicate_holds_its_worker_and_gets_the_value_without_going_round(
        self, shared, key, gate, acks, quiet_for
    ):
        first = shared.publish(f"waiting{acks}", key, gate.path)
        shared.noted("start", key)
        second = shared.publish(f"waiting{acks}", key, gate.path)
        shared.noted("prerun", task_id=second.id)
        quiet_for(0.5, lambda: not shared.ledger.count("postrun", task_id=second.id), "it waits")
        gate.open()
        assert second.get(timeout=PATIENCE) == first.get(timeout=PATIENCE)
        shared.idle(key)
        assert shared.received(second.id) == 1
        assert shared.ledger.count("start", key) == 1
        assert shared.ledger.count("conflicted", task_id=second.id) == 0

    def test_a_duplicate_goes_round_after_its_wait(self, shared, key, gate, acks):
        first = shared.publish(f"impatient{acks}", key, gate.path)
        shared.noted("start", key)
        second = shared.publish(f"impatient{acks}", key, gate.path)
        wait_for(lambda: shared.received(second.id) >= 2, PATIENCE, "a second round")
        shared.noted("postrun", task_id=second.id)
        began, ended = (
            shared.ledger.entries(phase, task_id=second.id)[0].time
            for phase in ("prerun", "postrun")
        )
        assert ended - began >= 0.5
        assert second.state in {"RETRY", "STARTED"}
        gate.open()
        assert second.get(timeout=PATIENCE) == first.get(timeout=PATIENCE)
        shared.idle(key)
        assert shared.ledger.count("start", key) == 1

    def test_a_redelivery_waits_and_leaves_the_result_alone(self, shared, key, gate, acks):
        first = shared.publish(f"waiting{acks}", key, gate.path)
        shared.noted("start", key)
        shared.deliver_again(shared.receipt(first.id))
        wait_for(lambda: shared.ledger.count("prerun", task_id=first.id) == 2, PATIENCE)
        gate.open()
        shared.idle(key)
        assert first.state == "SUCCESS"
        assert shared.received(first.id) == 2
        assert shared.ledger.count("start", key) == 1


@EITHER_ACKS
class TestIgnore:
    def test_a_duplicate_is_dropped_and_says_so(self, shared, key, gate, acks):
        first = shared.publish(f"ignoring{acks}", key, gate.path)
        shared.noted("start", key)
        second = shared.publish(f"ignoring{acks}", key, gate.path)
        shared.noted("postrun", task_id=second.id)
        assert [e.key for e in shared.ledger.entries("postrun", task_id=second.id)] == ["IGNORED"]
        assert second.state == "IGNORED"
        gate.open()
        first.get(timeout=PATIENCE)
        shared.idle(key)
        assert second.state == "IGNORED"
        assert shared.received(second.id) == 1
        assert shared.ledger.count("start", key) == 1

    def test_a_duplicate_of_a_completed_key_still_gets_the_value(self, shared, key, acks):
        first = shared.publish(f"ignoring{acks}", key).get(timeout=PATIENCE)
        assert shared.publish(f"ignoring{acks}", key).get(timeout=PATIENCE) == first
        assert shared.ledger.count("start", key) == 1

    def test_a_redelivery_is_not_dropped(self, shared, key, gate, acks):
        first = shared.publish(f"ignoring{acks}", key, gate.path)
        shared.noted("start", key)
        shared.deliver_again(shared.receipt(first.id))
        wait_for(lambda: shared.received(first.id) >= 3, PATIENCE, "the copy to come back")
        assert first.state == "STARTED"
        gate.open()
        shared.idle(key)
        assert first.state == "SUCCESS"
        assert shared.ledger.count("start", key) == 1
