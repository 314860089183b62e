"""Without a store nothing runs and nothing is lost; tests that keep to one process use its memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_idempotent import (
    IdempotentTask,
    InvalidOption,
    State,
)
from tests.support.telling import Heard


@pytest.fixture
def app() -> Iterator[Any]:
    """An app that is not configured, as a test suite may have it."""
    app: Any = Celery("no store", broker="amqp://", backend="rpc://", set_as_current=False)
    app.runs, app.sent = [], []
    app.send_task = lambda name, *_, **options: app.sent.append({"name": name, **options})
    yield app
    app.close()


def define(app: Any, **options: Any) -> Any:
    options = {"name": "charge", **options}

    @app.task(
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
    request = {"id": "m", "args": (key,), "kwargs": {}, "delivery_info": {}, "callbacks": [LINK]}
    return build_tracer(task.name, task, app=task.app)("m", [key], {}, request).info


LINK = {"task": "other", "args": (), "kwargs": {}, "options": {}}


@pytest.mark.parametrize("late", [True, False])
def test_a_message_for_a_task_that_a_worker_came_to_know_late_comes_back(
    app: Any, heard: Heard, late: bool
) -> None:
    """It was registered after the worker had looked at its tasks, found none of ours, and started."""
    assert deliver(define(app, acks_late=late), "k").state == "IGNORED"
    assert app.runs == []
    (again,) = app.sent
    assert again["task_id"] == "m"
    assert again["countdown"] > 0
    assert "set idempotency_store" in str(heard.events[0][2].error)


def test_it_runs_where_no_store_is_no_reason_not_to(app: Any, heard: Heard) -> None:
    task = define(app, idempotency_on_store_error="open")
    assert deliver(task, "k") is None
    assert app.runs == ["k"]
    assert "store_failed" in heard.names


def test_a_key_cannot_be_reserved_without_a_store(app: Any) -> None:
    with pytest.raises(InvalidOption, match="set idempotency_store"):
        define(app, idempotency_publish_once=True).delay("k")
    assert app.sent == []


SAID = "has no store, and keeps its records in the memory of this process"


@pytest.mark.parametrize("in_process", [True, False])
def test_an_app_that_stays_in_its_process_uses_the_memory_and_says_so_once(
    app: Any, caplog: pytest.LogCaptureFixture, in_process: bool
) -> None:
    if in_process:  # as the fixtures of Celery make it
        app.conf.broker_url = "memory://"
    else:
        app.conf.task_always_eager = True
    task = define(app)
    assert [task.apply(("a",)).get() for _ in range(2)] == ["receipt 1"] * 2
    assert task.idempotency_record("a").state is State.COMPLETED
    assert caplog.text.count(SAID) == 1
