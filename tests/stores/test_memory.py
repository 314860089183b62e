"""MemoryStore keeps the contract, and the table says what it is to say."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_idempotent.records import Identity
from celery_idempotent.stores import Store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.contract import StoreContract
from tests.contract.base import KEY as CLAIMED
from tests.contract.base import MESSAGE
from tests.stores.verbs import KEEP_MS, LEASE_MS, claim


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


class TestMemoryStore(StoreContract):
    @pytest.fixture
    def store(self, clock: FakeClock) -> Store:
        return MemoryStore(clock)

    @pytest.fixture
    def advance(self, clock: FakeClock) -> Callable[[float], None]:
        return clock.advance

    def test_a_deadline_doubles_ten_times_at_the_most(self, store, advance):
        self.reserve(store, message=MESSAGE, deadline_ms=1_000, keep_ms=86_400_000)
        advance(1_001)
        for times in range(13):
            assert len(store.sweep(limit=10, requeue_ms=1_000).requeued) == 1
            advance(1_000 * 2 ** min(times, 10) + 1)

    def test_what_waits_for_its_retry_outlives_the_claim_by_as_long(self, store, advance):
        record = self.claim(store, message=MESSAGE)
        assert store.release(CLAIMED, token=record.token, requeue_ms=self.lease_ms)
        advance(self.lease_ms + self.keep_ms + 1)
        assert store.get(CLAIMED) is not None

    @pytest.fixture
    def stop_at(self, clock: FakeClock) -> Callable[[int], None]:
        return lambda ms: clock.advance(ms - clock() / 1000)


def test_without_a_clock_it_uses_the_wall_clock():
    store = MemoryStore()
    before = time.time_ns() // 1_000_000
    assert before <= claim(store).created_ms <= time.time_ns() // 1_000_000


def test_a_prune_frees_memory(clock):
    store = MemoryStore(clock)
    for n in range(10):
        claim(store, Identity(namespace="charge", key=f"{n}"))
    clock.advance(LEASE_MS + KEEP_MS + 1)
    assert [store.prune(limit=4) for _ in range(4)] == [4, 4, 2, 0]
    assert repr(store) == "<MemoryStore: 0 records>"
