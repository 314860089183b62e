"""The pauses between tries."""

from __future__ import annotations

import pytest

from celery_idempotent import backoff
from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from tests.unit.test_runner import FakeTime


@pytest.fixture
def fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    fake = FakeTime()
    monkeypatch.setattr(backoff, "time", fake)
    return fake


@pytest.mark.parametrize(
    ("failures", "whole"), [(1, 0.05), (2, 0.1), (4, 0.4), (8, 5.0), (10_000, 5.0)]
)
def test_a_pause_is_twice_the_one_before_less_a_part_by_chance(failures, whole):
    drawn = {backoff.seconds(failures) for _ in range(50)}
    assert whole / 2 <= min(drawn) < max(drawn) <= whole


def test_the_last_try_is_made_when_the_time_is_over_and_no_earlier(fake_time):
    def fail() -> None:
        tries.append(fake_time.now - FakeTime.START)
        raise StoreUnavailable

    tries: list[float] = []
    with pytest.raises(StoreUnavailable):
        backoff.persist(fail, until=fake_time.now + 3)
    assert 5 < len(tries) < 12
    assert tries[-1] == pytest.approx(3)


def test_what_is_no_trouble_of_the_store_is_not_tried_again(fake_time):
    def fail() -> None:
        raise StoreMisconfigured

    with pytest.raises(StoreMisconfigured):
        backoff.persist(fail, until=fake_time.now + 3)
    assert fake_time.sleeps == []
