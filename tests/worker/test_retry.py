"""A retry is the same operation: it keeps its key, and never meets the claim of the run that asked for it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


def test_a_hundred_retries_without_a_countdown_never_meet_their_predecessor(shared, key):
    # Two at a time for four processes: an idle one has the retry before its predecessor is done.
    keys = [f"{key}.{n}" for n in range(2)]
    published = [shared.publish("retrying", each, 50, 0, 50) for each in keys]
    wait_for(
        lambda: all(shared.ledger.count("end", each) for each in keys),
        40,
        lambda: f"two ends; there are {[shared.ledger.count('start', each) for each in keys]} runs",
    )
    assert [shared.ledger.count("start", each) for each in keys] == [51, 51]
    assert [shared.conflicts(each.id) for each in published] == [0, 0]
    assert not any(shared.ledger.count("replayed", each) for each in keys)


class TestAFailure:
    def again(self, shared: Any, key: str, *args: Any, error: type[Exception]) -> None:
        result = shared.publish(*args)
        with pytest.raises(error):
            result.get(timeout=20)
        assert result.state == "FAILURE"
        assert shared.record(args[0], key) is None

    def test_leaves_the_key_free_for_a_new_message(self, shared, key, gate):
        self.again(shared, key, "failing", key, gate.path, error=RuntimeError)
        gate.open()
        answer = shared.publish("failing", key, gate.path).get(timeout=20)
        assert (shared.ledger.count("start", key), shared.ledger.count("end", key)) == (2, 1)
        assert shared.publish("failing", key, gate.path).get(timeout=20) == answer
        assert shared.ledger.count("start", key) == 2

    def test_after_the_last_retry_leaves_the_key_free_as_well(self, shared, key):
        for attempt in (1, 2):
            self.again(shared, key, "retrying", key, 9, 0.2, 2, error=RuntimeError)
            assert shared.ledger.count("start", key) == 3 * attempt

    def test_after_the_last_retry_of_celerys_own_leaves_it_free_too(self, shared, key):
        for attempt in (1, 2):
            self.again(shared, key, "autoretrying", key, 9, error=ZeroDivisionError)
            assert shared.ledger.count("start", key) == 4 * attempt
