"""Outcomes are counted without a round trip, and written now and then."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from celery_idempotent import tally as tally_module
from celery_idempotent.calls import Replay
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.lease import Heartbeat
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.tally import Tally
from tests.support.waiting import wait_for
from tests.unit.test_runner import FlakyStore, a_call, make_runner


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def tally(monkeypatch: pytest.MonkeyPatch) -> Tally:
    tally = Tally()
    monkeypatch.setattr("celery_idempotent.calls.tally", tally)
    monkeypatch.setattr("celery_idempotent.lease.tally", tally)
    return tally


def counted(store: MemoryStore) -> dict[tuple[str, str], int]:
    return {(each.task, each.outcome): each.count for each in store.counts(hours=2)}


def test_runs_and_replays_are_counted_by_task(store, tally):
    runner = make_runner(store)
    runner.execute(a_call(), lambda: 42)
    assert isinstance(runner.execute(a_call("t2"), lambda: 42), Replay)
    assert counted(store) == {}
    tally.write()
    assert counted(store) == {
        ("shop.charge", "claimed"): 1,
        ("shop.charge", "settled"): 1,
        ("shop.charge", "replayed"): 1,
    }
    tally.write()
    assert counted(store)["shop.charge", "claimed"] == 1


def test_the_heartbeat_writes_them(store, tally, monkeypatch):
    monkeypatch.setattr(tally_module, "EVERY", 0.05)
    heartbeat = Heartbeat()
    monkeypatch.setattr("celery_idempotent.runner.heartbeat", heartbeat)
    make_runner(store, lease_ms=300).execute(a_call(), lambda: 42)
    wait_for(lambda: ("shop.charge", "settled") in counted(store), what="the counters")


def test_nothing_is_written_more_often_than_every_few_seconds(store, tally):
    tally.add(store, "t", "idempotency_claimed")
    tally.beat()
    assert counted(store) == {}


def test_what_the_store_does_not_take_is_kept(store, tally):
    class Down(MemoryStore):
        down = True

        def count(self, outcomes: Any) -> None:
            if self.down:
                raise StoreUnavailable
            super().count(outcomes)

    down = Down()
    for _ in range(3):
        tally.add(down, "t", "idempotency_claimed")
        tally.write()
    down.down = False
    tally.write()
    assert counted(down) == {("t", "claimed"): 3}


def test_a_fault_of_the_store_harms_nothing(tally, caplog):
    class Broken(MemoryStore):
        def count(self, outcomes: Any) -> None:
            raise RuntimeError

    broken = Broken()
    tally.add(broken, "t", "idempotency_claimed")
    with caplog.at_level(logging.ERROR):
        tally.write()
    assert "could not be counted" in caplog.text


def test_a_store_without_counters_is_not_asked(tally):
    class Plain:
        def __init__(self) -> None:
            self.flaky = FlakyStore(MemoryStore())

    tally.add(Plain(), "t", "idempotency_claimed")  # type: ignore[arg-type]
    tally.write()
    assert not tally._counts
