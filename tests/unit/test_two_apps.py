"""Two apps with different settings in one process, whose tasks have the same names: neither sees the other's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, get_store

NAMES = ("shop", "bank")
SETTINGS: dict[str, dict[str, Any]] = {
    "shop": {"idempotency_lease": 30},
    "bank": {
        "idempotency_lease": 300,
        "idempotency_serializer": "pickle",
        "accept_content": ["json", "pickle"],
    },
}


@pytest.fixture
def apps() -> Iterator[dict[str, Celery]]:
    made: dict[str, Celery] = {}
    for name in NAMES:
        made[name] = Celery(name, broker="memory://", set_as_current=False)
        made[name].conf.update(idempotency_store="memory://", **SETTINGS[name])
        _define(name, made)
    yield made
    for app in made.values():
        app.close()


def _define(name: str, apps: dict[str, Celery]) -> None:
    app = apps[name]

    @app.task(name="work", base=IdempotentTask, shared=False, bind=True, idempotency_key="key")
    def work(self: Any, key: str) -> list[Any]:
        assert self.app is app
        record = self.idempotency.record
        return [name, self.request.id, record.deadline_ms - record.updated_ms]


def test_the_same_task_with_the_same_key_runs_once_in_each(apps: dict[str, Celery]) -> None:
    kept = {}
    for name in NAMES:
        work: Any = apps[name].tasks["work"]
        first = work.apply(("k",))
        lease_ms = SETTINGS[name]["idempotency_lease"] * 1000
        assert first.get() == work.apply(("k",)).get() == [name, first.id, lease_ms]
        record = work.idempotency_record("k")
        assert record.task_id == first.id
        kept[name] = record.value.content_type
    assert kept == {"shop": "application/json", "bank": "application/x-python-serialize"}
    assert get_store(apps["shop"]) is not get_store(apps["bank"])
