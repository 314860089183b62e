"""``idempotency_on_conflict``: what the matrix of tests/matrix does not show of it."""

from __future__ import annotations

from tests.policies.conftest import PATIENCE
from tests.support.waiting import wait_for


def test_a_copy_is_sent_as_its_message_was(shared, key, gate):
    shared.publish("work", key, gate.path)
    shared.noted("start", key)
    second = shared.publish("work", key, gate.path, delivery_mode=1, priority=3)
    wait_for(lambda: shared.received(second.id) >= 2, PATIENCE, "its copy")
    gate.open()
    message, copy = shared.receipts(second.id)[:2]
    kept = ("body", "content_type", "content_encoding", "delivery_mode", "priority", "reply_to")
    assert {name: copy[name] for name in kept} == {name: message[name] for name in kept}
    assert (message["delivery_mode"], message["priority"]) == (1, 3)
    second.get(timeout=PATIENCE)
