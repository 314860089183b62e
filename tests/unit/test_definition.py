"""A task that is used while another thread is still binding it, and options that are set after its definition."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_idempotent import IdempotentTask, InvalidOption, get_store
from celery_idempotent.keys.stamp import STAMP_HEADER
from celery_idempotent.stores.memory import MemoryStore


@pytest.mark.parametrize("late", [0.0, 0.05, 0.15])
def test_the_first_publishes_of_a_process_are_all_stamped(
    monkeypatch: pytest.MonkeyPatch, late: float
) -> None:
    """Celery's lazy finalize shows a half-bound task to other threads: they must not publish it unstamped."""
    bind = Task.bind.__func__  # type: ignore[attr-defined]

    def slow_bind(cls: Any, app: Any) -> Any:
        time.sleep(0.1)
        return bind(cls, app)

    monkeypatch.setattr(Task, "bind", classmethod(slow_bind))
    app = Celery("race", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = "memory://"
    published: list[Any] = []

    def send_task(*_: Any, **options: Any) -> None:
        published.append(options["headers"])

    monkeypatch.setattr(app, "send_task", send_task)

    @app.task(base=IdempotentTask, shared=False)
    def work(n: int) -> int:
        return n

    errors: list[Exception] = []

    def publish(pause: float) -> None:
        time.sleep(pause)
        try:
            work.apply_async((1,), idempotency_key="k")
        except Exception as error:  # noqa: BLE001  whatever it is, it is the failure
            errors.append(error)

    threads = [threading.Thread(target=publish, args=(pause,)) for pause in (0.0, late)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert errors == []
    assert [headers[STAMP_HEADER]["key"] for headers in published] == ["k", "k"]


class TestSetAfterItsDefinition:
    """Settings are read once."""

    @pytest.fixture
    def task(self) -> Iterator[Any]:
        app = Celery("later", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.update(idempotency_store=MemoryStore(), idempotency_lease=7)

        @app.task(base=IdempotentTask, idempotency_key="key", shared=False)
        def task(key: str) -> None: ...

        yield app.tasks[task.name]
        app.close()

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
