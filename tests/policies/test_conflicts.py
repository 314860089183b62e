"""``idempotency_on_conflict``: what the matrix of tests/matrix does not show of it."""

from __future__ import annotations

from tests.policies.conftest import PATIENCE
from tests.support.waiting import wait_for


def test_a_duplicate_goes_round_after_its_wait(shared, key, gate):
    first = shared.publish("impatient", key, gate.path)
    shared.noted("start", key)
    second = shared.publish("impatient", key, gate.path)
    wait_for(lambda: shared.received(second.id) >= 2, PATIENCE, "a second round")
    shared.noted("postrun", task_id=second.id)
    began, ended = (
        shared.ledger.entries(phase, task_id=second.id)[0].time for phase in ("prerun", "postrun")
    )
    assert ended - began >= 0.5
    assert second.state in {"RETRY", "STARTED"}
    gate.open()
    assert second.get(timeout=PATIENCE) == first.get(timeout=PATIENCE)
    shared.idle(key)
    assert shared.ledger.count("start", key) == 1
    assert shared.ledger.count("wrong sender") == 0
