"""Without a usable store nothing runs, and nothing is lost."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_idempotent import IdempotentTask, InvalidOption, signals


@pytest.fixture
def app() -> Iterator[Any]:
    """An app that is not configured, as a test suite may have it."""
    app: Any = Celery("no store", broker="amqp://", backend="rpc://", set_as_current=False)
    app.runs = []
    yield app
    app.close()


@pytest.fixture
def sent(app: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(app, "send_task", lambda *_, **options: found.append(options))
    return found


def define(app: Any, **options: Any) -> Any:
    @app.task(
        name="charge",
        base=IdempotentTask,
        bind=True,
        shared=False,
        idempotency_key="key",
        **options,
    )
    def charge(self: Any, key: str) -> str:
        app.runs.append(key)
        return f"receipt {len(app.runs)}"

    return charge


def deliver(task: Any, key: str) -> Any:
    """Run a message as a worker's child does; return the state it ends in."""
    request = {"id": "m", "args": (key,), "kwargs": {}, "delivery_info": {}, "is_eager": False}
    return build_tracer(task.name, task, app=task.app)("m", [key], {}, request).info


@pytest.fixture
def failures() -> Iterator[list[Any]]:
    found: list[Any] = []

    def note(event: Any, **_: Any) -> None:
        found.append(event)

    signals.store_failed.connect(note)
    yield found
    signals.store_failed.disconnect(note)


@pytest.mark.parametrize("late", [True, False])
def test_a_message_for_a_task_that_a_worker_came_to_know_late_comes_back(
    app: Any, sent: list[Any], failures: list[Any], late: bool
) -> None:
    """It was registered after the worker had looked at its tasks, found none of ours, and started."""
    assert deliver(define(app, acks_late=late), "k").state == "IGNORED"
    assert app.runs == []
    (again,) = sent
    assert again["task_id"] == "m"
    assert again["countdown"] > 0
    assert "set idempotency_store" in str(failures[0].error)


def test_it_runs_where_no_store_is_no_reason_not_to(app: Any, failures: list[Any]) -> None:
    task = define(app, idempotency_on_store_error="open")
    assert deliver(task, "k") is None
    assert app.runs == ["k"]
    assert len(failures) == 1


def test_a_key_cannot_be_reserved_without_a_store(app: Any, sent: list[Any]) -> None:
    with pytest.raises(InvalidOption, match="set idempotency_store"):
        define(app, idempotency_publish_once=True).delay("k")
    assert sent == []
