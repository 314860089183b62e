"""Outcomes are counted without a round trip, and written now and then."""

from __future__ import annotations

import logging
import subprocess
import sys
import time
from typing import Any
from unittest.mock import Mock

import pytest
from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent import signals as counters_module
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.signals import Counters
from celery_idempotent.stores.memory import MemoryStore
from tests.support.workers import child_environment


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> Counters:
    counters = Counters()
    monkeypatch.setattr("celery_idempotent.signals.counters", counters)
    monkeypatch.setattr("celery_idempotent.protocol.lease.counters", counters)
    return counters


def counted(store: MemoryStore) -> dict[tuple[str, str], int]:
    return {(each.task, each.outcome): each.count for each in store.counts(hours=2)}


def test_nothing_is_written_more_often_than_every_few_seconds(store, counters):
    counters.of(store)["t", "claimed"] += 1
    counters.beat()
    assert counted(store) == {}


def test_what_the_store_does_not_take_is_kept(store, counters):
    class Down(MemoryStore):
        down = True

        def count(self, outcomes: Any) -> None:
            if self.down:
                raise StoreUnavailable
            super().count(outcomes)

    down = Down()
    for _ in range(3):
        counters.of(down)["t", "claimed"] += 1
        counters.write()
    down.down = False
    counters.write()
    assert counted(down) == {("t", "claimed"): 3}


def test_a_fault_of_the_store_harms_nothing(counters, caplog):
    class Broken(MemoryStore):
        def count(self, outcomes: Any) -> None:
            raise RuntimeError

    broken = Broken()
    counters.of(broken)["t", "claimed"] += 1
    with caplog.at_level(logging.ERROR):
        counters.write()
    assert "could not be counted" in caplog.text


PUBLISHER = """
import os, sys, time
from celery import Celery
from celery_idempotent import IdempotentTask
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent import signals
from celery_idempotent.protocol import lease

if "often" in sys.argv:
    signals.WRITE_EVERY = lease.TICK = 0.2

class Told(MemoryStore):
    def count(self, outcomes):
        if "hang" in sys.argv:
            time.sleep(3600)
        print(*(f"{who} {task} {outcome} {n}" for (task, outcome), n in outcomes.items()), flush=True)

def threads():
    return len(os.listdir("/proc/self/task"))

who = "parent"
app = Celery("shop", broker="memory://", set_as_current=False)
app.conf.idempotency_store = Told()

@app.task(base=IdempotentTask, name="charge", idempotency_key="n", idempotency_publish_once=True)
def charge(n):
    pass

charge.name
before = threads()
for n in range(3):
    charge.delay(n)
assert threads() == before + 1, "one thread writes"
"""


def publish(then: str = "", *args: str) -> subprocess.Popen[str]:
    """Start a process that publishes, and never claims anything."""
    return subprocess.Popen(
        [sys.executable, "-c", PUBLISHER + then, *args],
        env=child_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )


def test_what_a_publisher_counts_is_written_while_it_lives():
    with publish("time.sleep(3600)", "often") as process:
        try:
            assert process.stdout is not None
            written = 0
            while written < 3:
                counter, _, count = process.stdout.readline().rpartition(" ")
                assert counter == "parent charge reserved"
                written += int(count)
        finally:
            process.kill()


def test_a_fork_of_a_publisher_writes_its_own_counts_and_not_those_of_its_parent():
    fork = """
if not os.fork():
    who = "child"
    assert threads() == 1
    charge.delay("other")
    sys.exit()
os.wait()
"""
    with publish(fork) as process:
        out, _ = process.communicate(timeout=60)
    assert sorted(out.splitlines()) == ["child charge reserved 1", "parent charge reserved 3"]


def test_a_process_that_ends_does_not_wait_for_ever_for_a_store_that_counts_no_more():
    with publish("print('over', flush=True)", "hang") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "over\n"
        since = time.monotonic()
        assert process.wait(timeout=60) == 0
        assert time.monotonic() - since < 30


def test_a_time_limit_that_strikes_while_they_are_written_stops_no_later_writing(
    counters, monkeypatch
):
    """A sweep writes them in the thread that signals strike in, at any moment."""
    store = Mock(supports_counting=True)
    counters.of(store)["shop.charge", "claimed"] += 1
    with monkeypatch.context() as patch:
        patch.setattr(counters_module.time, "monotonic", Mock(side_effect=SoftTimeLimitExceeded))
        with pytest.raises(SoftTimeLimitExceeded):
            counters.write()
    counters.of(store)["shop.charge", "settled"] += 1
    counters.write()
    store.count.assert_called_once_with(
        {("shop.charge", "claimed"): 1, ("shop.charge", "settled"): 1}
    )
    assert not counters.counts
