"""A retry is the same operation: it keeps its key, and never meets the claim of the run that asked for it."""

from __future__ import annotations

import pytest

from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


def test_fifty_retries_without_a_countdown_never_meet_their_predecessor(shared, key):
    # Two at a time for four processes: an idle one has the retry before its predecessor is done.
    keys = [f"{key}.{n}" for n in range(2)]
    published = [shared.publish("retrying", each, 25, 0, 50) for each in keys]
    wait_for(
        lambda: all(shared.ledger.count("end", each) for each in keys),
        40,
        lambda: f"two ends; there are {[shared.ledger.count('start', each) for each in keys]} runs",
    )
    assert [shared.ledger.count("start", each) for each in keys] == [26, 26]
    assert [shared.conflicts(each.id) for each in published] == [0, 0]
    assert not any(shared.ledger.count("replayed", each) for each in keys)
