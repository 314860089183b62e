"""Without a store nothing runs and nothing is lost; tests that keep to one process use its memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.app.trace import build_tracer

from celery_idempotent import (
    IdempotentTask,
    InvalidOption,
    State,
    StoreMisconfigured,
    signals,
)
from tests.support.workers import child_environment


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


@pytest.fixture
def failures() -> Iterator[list[Any]]:
    found: list[Any] = []

    def note(event: Any, **_: Any) -> None:
        found.append(event)

    signals.store_failed.connect(note)
    yield found
    signals.store_failed.disconnect(note)


LINK = {"task": "other", "args": (), "kwargs": {}, "options": {}}


@pytest.mark.parametrize("late", [True, False])
def test_a_message_for_a_task_that_a_worker_came_to_know_late_comes_back(
    app: Any, failures: list[Any], late: bool
) -> None:
    """It was registered after the worker had looked at its tasks, found none of ours, and started."""
    assert deliver(define(app, acks_late=late), "k").state == "IGNORED"
    assert app.runs == []
    (again,) = app.sent
    assert again["task_id"] == "m"
    assert again["countdown"] > 0
    assert "set idempotency_store" in str(failures[0].error)


def test_it_runs_where_no_store_is_no_reason_not_to(app: Any, failures: list[Any]) -> None:
    task = define(app, idempotency_on_store_error="open")
    assert deliver(task, "k") is None
    assert app.runs == ["k"]
    assert len(failures) == 1


def test_a_key_cannot_be_reserved_without_a_store(app: Any) -> None:
    with pytest.raises(InvalidOption, match="set idempotency_store"):
        define(app, idempotency_publish_once=True).delay("k")
    assert app.sent == []


SAID = "has no store, and keeps its records in the memory of this process"


def test_an_eager_run_of_an_app_without_a_store_is_refused(app: Any) -> None:
    with pytest.raises(StoreMisconfigured, match="set idempotency_store"):
        define(app).apply(("a",), throw=True)
    assert app.runs == []


def test_an_app_that_is_always_eager_uses_the_memory_and_says_so_once(
    app: Any, caplog: pytest.LogCaptureFixture
) -> None:
    app.conf.task_always_eager = True
    task = define(app)
    assert [task.delay("a").get() for _ in range(2)] == ["receipt 1"] * 2
    assert task.idempotency_record("a").state is State.COMPLETED
    assert caplog.text.count(SAID) == 1


def test_a_bad_store_is_no_missing_one(app: Any) -> None:
    app.conf.idempotency_store = "nonsense://"
    with pytest.raises(StoreMisconfigured, match="nonsense"):
        define(app).apply(("a",), throw=True)


SUITE = """
import pytest
from celery_idempotent import IdempotentTask

pytest_plugins = ("celery.contrib.pytest",)


@pytest.fixture(scope="session")
def celery_worker_parameters():
    return {"perform_ping_check": False}


@pytest.fixture(scope="session")
def celery_config():
    options = {"polling_interval": 0.02}
    return {"result_backend": "cache+memory://", "broker_transport_options": options}


def test_one_run(celery_app, celery_worker):
    runs = []

    @celery_app.task(base=IdempotentTask, idempotency_key="key")
    def charge(key):
        runs.append(key)
        return len(runs)

    celery_worker.reload()
    assert [charge.delay("a").get(timeout=60, interval=0.01) for _ in range(3)] == [1, 1, 1]
    assert [charge.apply(("b",)).get() for _ in range(2)] == [2, 2]
"""


def test_the_fixtures_of_celery_need_no_store(tmp_path: Path) -> None:
    """Broker and worker are in the process of the test."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "test_suite.py"],
        cwd=tmp_path,
        env=child_environment({"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr
