"""A store of somebody else's that looks and swaps, and can do nothing beyond the verbs."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import sweep
from celery_idempotent.celery.checks import check_or_raise
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import Store
from celery_idempotent.stores.memory import MemoryStore


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
