"""A definition of a task: made in one thread, read once, found by its namespace, changed by a deploy."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery import Celery, Task

from celery_idempotent import IdempotentTask, InvalidOption, get_store
from celery_idempotent.celery import definition
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.unit.conftest import Published


@pytest.mark.parametrize("late", [0.0, 0.05, 0.15])
def test_the_first_publishes_of_a_process_are_all_stamped(
    app: Celery, published: Published, monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """Celery's lazy finalize shows a half-bound task to other threads: they must not publish it unstamped."""
    bind = Task.bind.__func__  # type: ignore[attr-defined]

    def slow_bind(cls: Any, app: Any) -> Any:
        time.sleep(0.1)
        return bind(cls, app)

    monkeypatch.setattr(Task, "bind", classmethod(slow_bind))

    @app.task(base=IdempotentTask, shared=False)
    def work(n: int) -> int:
        return n

    def publish(pause: float) -> None:
        time.sleep(pause)
        work.apply_async((1,), idempotency_key="k")

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(publish, (0.0, late)))
    assert [message.stamp["key"] for message in published] == ["k", "k"]


class TestSetAfterItsDefinition:
    """Settings are read once."""

    @pytest.fixture
    def task(self, app: Celery) -> Any:
        app.conf.idempotency_lease = 7
        app.task(base=IdempotentTask, name="run", shared=False)(run)
        return app.tasks["run"]

    def test_a_setting_of_the_app_has_no_effect(self, task):
        store = get_store(task.app)
        task.app.conf.update(idempotency_store=MemoryStore(), idempotency_lease=8)
        assert get_store(task.app) is store
        assert task.idempotency_policy.lease_ms == 7000

    def test_an_option_of_the_task_is_refused(self, task):
        with pytest.raises(InvalidOption, match="is read when the task is defined"):
            task.idempotency_mode = "off"
        task.rate_limit = 5
        assert task.rate_limit == 5


def run():
    pass


def task(app, name, **options):
    return app.task(base=IdempotentTask, name=name, shared=False, **options)(run)


def test_tasks_that_this_process_does_not_know_are_imported_when_they_are_looked_for(app):
    imported = []

    def import_default_modules():
        imported.append(True)
        task(app, "shop.late")

    app.loader.import_default_modules = import_default_modules
    task(app, "shop.pay")
    assert definition.definition_of(app, "shop.pay", load=True) is not None
    assert definition.definition_of(app, "shop.late") is None
    assert not imported
    assert definition.definition_of(app, "shop.late", load=True).name == "shop.late"
    assert {each.name for each in definition.definitions(app, load=True)} == {
        "shop.late",
        "shop.pay",
    }
    assert len(imported) == 1


def test_tasks_of_one_name_in_two_apps_have_nothing_in_common():
    kept = {}
    pickled = {"idempotency_serializer": "pickle", "accept_content": ["json", "pickle"]}
    for name, settings in {"shop": {"idempotency_lease": 30}, "bank": pickled}.items():
        app = Celery(name, broker="memory://", set_as_current=False)
        app.conf.update(idempotency_store="memory://", **settings)

        @app.task(name="work", base=IdempotentTask, shared=False, bind=True, idempotency_key="key")
        def work(self: Any, key: str) -> list[Any]:
            return [self.request.id, self.idempotency.policy.lease_ms]

        first: Any = work.apply(("k",))
        assert first.get() == work.apply(("k",)).get()
        found: Any = work.idempotency_record("k")
        kept[name] = (found.task_id == first.id, first.get()[1], found.value.content_type)
    assert kept == {
        "shop": (True, 30_000, "application/json"),
        "bank": (True, 60_000, "application/x-python-serialize"),
    }


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
