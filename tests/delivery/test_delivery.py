"""A message of an old publisher, whose app does not import the library: no header, so the worker finds the key."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.support.sites import Message
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.mark.parametrize("protocol", [1, 2])
def test_it_may_be_written_by_hand_in_any_protocol(shared, key, protocol):
    task_id = str(uuid.uuid4())
    if protocol == 1:
        headers: dict[str, Any] = {}
        body: Any = {"task": "keyed", "id": task_id, "args": [key], "kwargs": {}}
    else:
        headers = {"task": "keyed", "id": task_id}
        body = [[key], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
    about = {"serializer": "json", "correlation_id": task_id}
    by_hand = shared.deliver(Message(task_id, body, headers, about), times=2).get(timeout=20)
    assert shared.publish("keyed", key).get(timeout=20) == by_hand
    wait_for(lambda: shared.ledger.count("replayed", key) >= 2, 20, "two replays")
    assert shared.ledger.count("start", key) == 1
