"""A deploy that changes names or keys: what is kept, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.delivery import deliver_message, message_of


@pytest.fixture
def runs() -> list[str]:
    return []


@pytest.fixture
def version(runs: list[str]) -> Callable[..., Any]:
    """Return a function that defines the task as a version of the app has it; all versions have one store."""
    store = MemoryStore()

    def version(*, name: str = "charge", **options: Any) -> Any:
        app = Celery("version", broker="memory://", set_as_current=False)
        app.conf.idempotency_store = store

        def charge(order: str, kind: str = "sale") -> str:
            runs.append(order)
            return "receipt"

        options = {"idempotency_key": "order", **options}
        return app.task(name=name, base=IdempotentTask, shared=False, **options)(charge)

    return version


def call(task: Any) -> Any:
    return message_of(task, ("o-1",), {})


def test_a_renamed_task_keeps_its_records_by_its_namespace(version, runs):
    before, after = version(), version(name="pay", idempotency_namespace="charge")
    deliver_message(before, call(before))
    assert deliver_message(after, call(after)).value == "receipt"
    assert runs == ["o-1"]


def test_a_message_in_flight_keeps_the_key_that_it_carries(version, runs):
    before, after = version(), version(idempotency_key=("order", "kind"))
    first, second = call(before), call(before)
    deliver_message(before, first)
    assert deliver_message(after, second).value == "receipt"
    assert runs == ["o-1"]
