"""MemoryStore keeps the contract; a store of somebody else's, which has the verbs and no more, does for tasks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import sweep
from celery_idempotent.celery.checks import check_or_raise
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import Store
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


def _forwarded(verb: str) -> Any:
    return lambda self, *args, **kwargs: getattr(self.memory, verb)(*args, **kwargs)


class _Verbs(Store):
    def __init__(self, memory: MemoryStore) -> None:
        self.memory = memory


OwnStore: Any = type(
    "OwnStore", (_Verbs,), {name: _forwarded(name) for name in Store.__abstractmethods__}
)


@pytest.fixture
def store() -> Any:
    return OwnStore(MemoryStore())


@pytest.fixture
def app(store: Any) -> Celery:
    app = Celery("own", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = store
    return app


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(base=IdempotentTask, name="own.add", idempotency_key="number")
    def add(number: int) -> int:
        return number + 1

    return add


def test_tasks_run_once_with_it(task: Any, store: Any) -> None:
    assert get_store(task.app) is store
    assert task.apply((1,)).get() == 2
    assert task.apply((1,)).get() == 2
    assert task.idempotency_record(1).attempts == 1


def test_a_sweep_has_nothing_to_count_and_nothing_else_to_look_after(app: Celery) -> None:
    counts = sweep.sweep(app)
    assert counts["pruned"] == 0
    assert get_store(app).counts(hours=1) == ()


def test_an_atomic_task_is_refused_at_the_start_of_a_worker_and_by_the_run(
    app: Celery, store: Any
) -> None:
    # Not shared: the apps of other tests would have it, too, and their settings may exclude it.
    @app.task(base=IdempotentTask, name="own.atomic", shared=False, idempotency_atomic=True)
    def task() -> int:
        return 1

    with pytest.raises(StoreMisconfigured, match="OwnStore has no transactions"):
        check_or_raise(app)  # a worker does, before it starts
    with pytest.raises(StoreMisconfigured, match="OwnStore has no transactions"):
        task.apply(throw=True)
    with pytest.raises(NotImplementedError, match="no transactions"):
        store.unguarded_transaction()
