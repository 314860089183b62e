"""One worker with the tasks of every page, its broker and its store, for all tests."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult

from celery_idempotent import get_store
from tests.migrations.app import SETTINGS_VARIABLE, make_app, order
from tests.support.apps import close_app
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.servers import embedded_redis
from tests.support.waiting import wait_for
from tests.support.workers import Worker

#: A result, or whatever a test waits for, is there after so many seconds, or never.
PATIENCE = 30

#: Of all tasks that do not say otherwise, so that a frozen worker loses its key soon.
LEASE = 2


@dataclass
class Shop:
    """The publisher's side, and what happened on the worker's."""

    app: Celery
    redis: redis.Redis
    worker: Worker
    ledger: Ledger

    def task(self, name: str) -> Any:
        return self.app.tasks[name]

    def order(self, word: str, key: str) -> Path:
        """Tell the work on ``key`` to wait (``closed1`` in its first run, …), to ``kill`` its process, to ``fail``."""
        path = order(self.ledger.path.parent, word, key)
        path.touch()
        return path

    def starts(self, key: str) -> int:
        return self.ledger.count("start", key)

    def ends(self, key: str) -> int:
        return self.ledger.count("end", key)

    def started(self, key: str, times: int = 1) -> None:
        """Wait until the work on ``key`` started so many times."""
        wait_for(
            lambda: self.starts(key) >= times,
            PATIENCE,
            lambda: f"start {times} of {key}: {self.ledger.entries(key=key)}",
        )

    def passed(self) -> None:
        """Wait until everything that was sent before this has reached a process: the queue is in order."""
        self.app.tasks["fence"].delay().get(timeout=PATIENCE)

    def take(self, task: Any, *args: Any, **options: Any) -> dict[str, Any]:
        """Publish where nobody listens, and return the message as the broker has it."""
        aside = f"aside.{uuid.uuid4().hex}"
        task.apply_async(args, queue=aside, **options)
        packed: Any = self.redis.lpop(aside)
        message: dict[str, Any] = json.loads(packed)
        return message

    def deliver(self, message: dict[str, Any], **headers: Any) -> AsyncResult[Any]:
        """Put a copy of a message into the worker's queue."""
        copy = json.loads(json.dumps(message))
        copy["headers"] |= headers
        # What the transport itself puts on each message that it takes over.
        copy["properties"]["delivery_tag"] = str(uuid.uuid4())
        queue: str = self.app.conf.task_default_queue
        self.redis.lpush(queue, json.dumps(copy))
        return self.app.AsyncResult(copy["headers"]["id"])


@pytest.fixture(scope="session")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    directory = tmp_path_factory.mktemp("migrations")
    ledger = Ledger(directory / "ledger.jsonl")
    with embedded_redis() as server:
        url = server.url(1)
        settings = {
            "broker_url": url,
            "result_backend": url,
            "task_default_queue": "migrations",
            "worker_prefetch_multiplier": 1,
            "broker_connection_retry_on_startup": True,
            "idempotency_lease": LEASE,
            "ONCE": {
                "backend": "celery_once.backends.Redis",
                "settings": {"url": url, "default_timeout": 3600},
            },
        }
        worker = Worker(
            "tests.migrations.app",
            directory=directory,
            concurrency=6,
            env={SETTINGS_VARIABLE: json.dumps(settings), LEDGER_VARIABLE: str(ledger.path)},
        )
        app = make_app(settings)
        client = redis.Redis.from_url(url)
        try:
            worker.start(timeout=60)
            yield Shop(app=app, redis=client, worker=worker, ledger=ledger)
        finally:
            worker.kill()
            get_store(app).close()
            close_app(app)
            client.close()


@pytest.fixture
def key(request: pytest.FixtureRequest) -> Iterator[str]:
    """A key that nobody else uses; whatever waits for it goes on after the test."""
    name = f"key.{uuid.uuid4().hex}"
    yield name
    shop: Shop = request.getfixturevalue("shop")
    for path in shop.ledger.path.parent.glob(f"closed* {name}"):
        path.unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the end of the worker's log with a failure."""
    report: pytest.TestReport = yield
    shop = getattr(item, "funcargs", {}).get("shop")
    if report.failed and shop is not None:
        report.sections.append((f"log of {shop.worker.name}", shop.worker.tail(80)))
    return report
