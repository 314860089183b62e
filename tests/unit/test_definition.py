"""A task that is used while another thread is still binding it, and options that are set when it is in use."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task

from celery_idempotent import IdempotentTask, InvalidOption, get_store
from celery_idempotent.identity.stamp import STAMP_HEADER
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


def test_headers_handed_on_to_another_call_do_not_hand_on_the_key() -> None:
    app = Celery("headers", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store="memory://", task_always_eager=True)
    runs: list[str] = []

    @app.task(base=IdempotentTask, idempotency_key="name", shared=False)
    def child(name: str) -> None:
        runs.append(name)

    @app.task(base=IdempotentTask, idempotency_key="name", bind=True, shared=False)
    def parent(self: Any, name: str) -> None:
        for each in ("a", "b"):
            child.apply_async((each,), headers=self.request.headers)
        assert self.request.headers[STAMP_HEADER]["key"] == name

    parent.delay("p").get()

    assert runs == ["a", "b"]


class TestSetAfterItsFirstUse:
    @pytest.fixture
    def app(self) -> Iterator[Celery]:
        app = Celery("later", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.idempotency_store = MemoryStore()
        yield app
        app.close()

    @pytest.fixture
    def runs(self) -> list[str]:
        return []

    @pytest.fixture
    def task(self, app: Celery, runs: list[str]) -> Any:
        @app.task(base=IdempotentTask, idempotency_key="key", shared=False)
        def task(key: str) -> None:
            runs.append(key)

        for _ in range(2):
            task.apply(("first",))
        assert runs == ["first"]
        return task

    def test_a_store_is_used(self, app, task, runs):
        second = app.conf.idempotency_store = MemoryStore()
        task.apply(("first",))
        assert runs == ["first", "first"]
        assert get_store(app) is second
        assert task.idempotency_record("first") is not None

    def test_whatever_else_is_set_leaves_the_store_alone(self, app, task, runs):
        store = get_store(app)
        app.conf.task_track_started = True
        app.conf.update(task_ignore_result=True, something="of mine")
        task.apply(("first",))
        assert get_store(app) is store
        assert runs == ["first"]

    def test_a_mode_is_that_of_the_next_call(self, app, task, runs):
        late = task.acks_late
        app.conf.idempotency_mode = "off"
        task.apply(("first",))
        assert task.acks_late is app.conf.task_acks_late is not late
        app.conf.idempotency_mode = "enforce"
        task.apply(("first",))
        assert task.acks_late is late
        assert runs == ["first", "first"]

    def test_so_is_one_of_the_task(self, task, runs):
        task.idempotency_mode = "off"
        task.apply(("first",))
        task.idempotency_mode = "enforce"
        task.apply(("first",))
        assert runs == ["first", "first"]

    def test_so_is_any_other_option(self, app, task):
        app.conf.idempotency_lease = 7
        assert task.idempotency_policy.lease_ms == 7000
        task.idempotency_lease = 8
        assert task.idempotency_policy.lease_ms == 8000

    def test_what_cannot_be_is_refused(self, app, task):
        with pytest.raises(InvalidOption, match="idempotency_mode"):
            task.idempotency_mode = "of"
        assert task.idempotency_policy.mode == "enforce"
        app.conf.idempotency_mode = "of"
        for _ in range(2):
            with pytest.raises(InvalidOption, match="idempotency_mode"):
                task.delay("second")

    def test_a_store_that_cannot_be_is_refused(self, app, task):
        app.conf.idempotency_store = "nonsense://"
        for _ in range(2):
            with pytest.raises(InvalidOption, match="nonsense"):
                get_store(app)
