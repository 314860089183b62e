"""Duplicates with Redis as the broker."""

from __future__ import annotations

import pytest

from tests.delivery.cells import Scenario
from tests.delivery.matrix import Matrix, Played, cells
from tests.delivery.scenarios import SLOW
from tests.support.sites import IMPATIENT


@pytest.mark.worker
@pytest.mark.redis
@pytest.mark.timeout(400)
class TestOnRedis(Matrix):
    """The killed worker has a visibility timeout that is shorter than some of its tasks."""

    broker = "redis"
    settings = {"broker_transport_options": IMPATIENT}  # noqa: RUF012
    more = SLOW

    @cells(*SLOW)
    def test_copies_stay_bounded_under_a_short_visibility_timeout(
        self, played: Played, scenario: Scenario, policy: str, acks: str
    ) -> None:
        self.judge(played, scenario, policy, acks)
