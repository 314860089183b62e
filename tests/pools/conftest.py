"""A site for each pool: an app, its broker, result backend and store in a Redis of our own, and workers to watch."""

from __future__ import annotations

import contextlib
import itertools
import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_idempotent import State, get_store
from tests.pools import app as app_module
from tests.support.apps import close_app
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.servers import EmbeddedRedis, embedded_redis
from tests.support.waiting import wait_for
from tests.support.workers import Worker

#: What a test waits for is there after so many seconds, or never.
PATIENCE = 40.0


@dataclass
class Site:
    """One app with its broker, store and queue, and the directory of its ledger, gates and logs."""

    settings: dict[str, Any]
    directory: Path
    workers: list[Worker] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.app: Celery = app_module.make_app(self.settings)
        self.ledger = Ledger(self.directory / f"ledger-{uuid.uuid4().hex}.jsonl")

    def worker(self, pool: str, *, env: dict[str, str] | None = None, **options: Any) -> Worker:
        """Start a worker of this app, and wait until it is ready."""
        worker = Worker(
            "tests.pools.app",
            directory=self.directory,
            name=f"{pool}-{uuid.uuid4().hex[:6]}",
            pool=pool,
            env={
                LEDGER_VARIABLE: str(self.ledger.path),
                app_module.SETTINGS_VARIABLE: json.dumps(self.settings),
                **(env or {}),
            },
            **options,
        )
        self.workers.append(worker)
        return worker.start(timeout=60)

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.tasks[task].apply_async(args, **options)
        return result

    def open(self, gate: str) -> None:
        app_module.gate_path(self.directory, gate).touch()

    def record(self, key: str) -> Any:
        found: Any = self.app.tasks["work"]
        return found.idempotency_record(key)

    def count(self, phase: str, key: str) -> int:
        return self.ledger.count(phase, key)

    def noted(self, phase: str, key: str, times: int = 1) -> None:
        """Wait until the ledger has this, so many times."""
        wait_for(
            lambda: self.count(phase, key) >= times,
            PATIENCE,
            lambda: f"{phase} ({times}) in {self.ledger.entries(key=key)}\n{self.logs()}",
        )

    def value(self, result: AsyncResult[Any]) -> Any:
        """Wait for SUCCESS; return the value."""
        return self.end(result, "SUCCESS")

    def end(self, result: AsyncResult[Any], state: str) -> Any:
        """Wait for a state; return the result."""
        wait_for(
            lambda: result.state in {state, "SUCCESS", "FAILURE"},
            PATIENCE,
            lambda: f"{state}, is {result.state}\n{self.logs()}",
            interval=0.05,
        )
        assert result.state == state, f"{result.result!r}\n{self.logs()}"
        return result.result

    def completed(self, key: str) -> None:
        """Wait until the record is completed."""
        wait_for(
            lambda: (record := self.record(key)) and record.state is State.COMPLETED,
            PATIENCE,
            lambda: f"the end of {key}: {self.record(key)}\n{self.logs()}",
            interval=0.05,
        )

    def logs(self) -> str:
        return "\n".join(worker.tail() for worker in self.workers)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        get_store(self.app).close()
        close_app(self.app)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedRedis]:
    with embedded_redis(options={"databases": "100"}) as server:
        yield server


@pytest.fixture(scope="session")
def databases(server: EmbeddedRedis) -> Iterator[str]:
    """Addresses of databases that nobody used before."""
    return (server.url(number) for number in itertools.count())


@pytest.fixture(scope="module")
def open_site(
    databases: Iterator[str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Site]]:
    """Open a site that lives as long as the module: ``open_site(idempotency_lease=2)``."""
    with contextlib.ExitStack() as stack:

        def open_site(**settings: Any) -> Site:
            settings = {
                "broker_url": next(databases),
                "result_backend": next(databases),
                "task_default_queue": f"queue.{uuid.uuid4().hex}",
                "broker_connection_retry_on_startup": True,
                "task_track_started": True,
                "idempotency_lease": 30,
                "idempotency_sweep_interval": None,
                **settings,
            }
            site = Site(settings, tmp_path_factory.mktemp("site"))
            stack.callback(site.close)
            return site

        yield open_site


@pytest.fixture
def key() -> str:
    """A key that nobody else uses."""
    return f"key.{uuid.uuid4().hex}"


@pytest.fixture
def gate() -> str:
    """A gate that nobody else uses."""
    return uuid.uuid4().hex
