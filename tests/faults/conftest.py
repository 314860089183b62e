"""A stage for each test: an app whose store, broker and workers can be broken one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import pytest
import redis
from celery.result import AsyncResult

from celery_idempotent.records import State
from celery_idempotent.stores.redis.servers import SCRIPTS, SOURCES
from tests.delivery import app as app_module
from tests.support import sites
from tests.support.apps import environment
from tests.support.ledger import Ledger
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis, RabbitMQ
from tests.support.waiting import wait_for
from tests.support.workers import Worker

#: Is the result backend another Redis, or the store? Then results are stored by the settle.
TOGETHER = pytest.mark.parametrize("together", [False, True], ids=["apart", "together"])


@dataclass
class Stage(sites.Site):
    """A site as a test sees it: its own ways lead past whatever is broken, those of its workers through that."""

    module: ClassVar[Any] = app_module

    behind: dict[str, Any]

    def worker(self, name: str | None = None, **options: Any) -> Worker:
        """Start a worker; ``conf`` are settings of its own."""
        env = environment({**self.settings, **self.behind, **options.pop("conf", {})})
        return self.start(self.module.__name__, name=name, env=env, **options)

    def open(self, gate: str) -> None:
        (self.ledger.path.parent / f"gate-{gate}").touch()

    def record(self, key: str, task: str = "work") -> Any:
        found: Any = self.app.tasks[task]
        return found.idempotency_record(key)

    def says(self, worker: Worker, *lines: str, timeout: float = 20) -> None:
        """Wait until the log of a worker has all these."""
        for line in lines:
            what = f"{line!r} in the log of {worker.name}"
            wait_for(partial(_in_log, worker, line), timeout, what)

    def state(self, key: str, task: str = "work") -> State | None:
        record = self.record(key, task)
        return record.state if record else None

    def effects(self, key: str) -> int:
        return self.ledger.count("end", key)

    def starts(self, key: str) -> int:
        return self.ledger.count("start", key)

    def started(self, key: str) -> int:
        """Wait for a run to start; return the pid of its process."""
        entries = wait_for(lambda: self.ledger.entries("start", key), 20, f"{key} to start")
        return entries[0].pid

    def told(self, outcome: str, key: str) -> int:
        """How often a signal was sent."""
        return self.ledger.count(outcome, key)

    def tells(self, outcome: str, key: str) -> None:
        """Wait for a signal, which follows what it tells of; it is sent once."""
        wait_for(lambda: self.told(outcome, key), 20, f"the signal {outcome}")
        assert self.told(outcome, key) == 1

    def succeeds(self, result: AsyncResult[Any]) -> Any:
        """Wait for SUCCESS; return the value."""
        return self._ends(result, "SUCCESS")

    def fails(self, result: AsyncResult[Any]) -> Any:
        """Wait for FAILURE; return the exception."""
        return self._ends(result, "FAILURE")

    def _ends(self, result: AsyncResult[Any], state: str) -> Any:
        wait_for(
            lambda: result.state in ("SUCCESS", "FAILURE"),
            30,
            lambda: f"{state}, is {result.state}, ledger: {self.ledger.entries()}",
            interval=0.05,
        )
        assert result.state == state, f"{result.result!r}, ledger: {self.ledger.entries()}"
        return result.result

    def ran_once(self, key: str, result: AsyncResult[Any], *, task: str = "work") -> None:
        """One run, one result, and a duplicate gets it."""
        value = self.succeeds(result)
        assert self.effects(key) == 1, self.ledger.entries()
        assert self.state(key, task) is State.COMPLETED
        assert self.succeeds(self.publish(task, key)) == value
        assert self.effects(key) == 1, self.ledger.entries()


def _in_log(worker: Worker, line: str) -> bool:
    return line in worker.log


@pytest.fixture
def set_stage(
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq: RabbitMQ,
    rabbitmq_queue: str,
    private_redis: EmbeddedRedis,
    redis_proxy: Proxy,
    databases: Iterator[str],
) -> Iterator[Callable[..., Stage]]:
    """Set the stage: broker RabbitMQ, the store behind ``redis_proxy``, leases of 30 s unless told otherwise.

    The result backend is another Redis, that no test breaks; or, ``together``, it is the store.
    """
    made: list[Stage] = []

    def make(
        *, store: str = "", direct: str = private_redis.url(), together: bool = False, **conf: Any
    ) -> Stage:
        behind = {"idempotency_store": store or redis_proxy.url()}
        if "worker_broker" in conf:
            behind["broker_url"] = conf.pop("worker_broker")
        if together:
            behind["result_backend"] = behind["idempotency_store"].partition("?")[0]
        settings = {
            "broker_url": rabbitmq.url,
            "broker_connection_retry_on_startup": True,
            # What a lost connection to the broker costs shall be known, not found out.
            "broker_connection_timeout": 2,
            "result_backend": direct if together else next(databases),
            "task_default_queue": rabbitmq_queue,
            "idempotency_store": direct,
            "idempotency_sweep_interval": None,
            "idempotency_lease": 30,
            **conf,
        }
        stage = Stage(
            broker="rabbitmq",
            settings=settings,
            ledger=ledger,
            app=app_module.make_app(settings),
            redis=redis.Redis.from_url(settings["result_backend"]),
            new_queue=rabbitmq.queue,
            start=start_worker,
            behind=behind,
        )
        made.append(stage)
        return stage

    yield make
    for each in made:
        each.close()


@pytest.fixture
def digests(private_redis: EmbeddedRedis) -> dict[str, bytes]:
    """By verb, the bytes that its requests contain; the server knows every script."""
    client = redis.Redis.from_url(private_redis.url())
    for digest, source in SOURCES.items():
        assert client.script_load(source) == digest.decode()
    client.close()

    def with_words(count: int, name: str) -> bytes:
        return b"*%d\r\n$7\r\nEVALSHA\r\n$40\r\n%b" % (count, SCRIPTS[name])

    # A look is the script of a claim without arguments, a release that of a settle.
    return SCRIPTS | {
        "claim": with_words(9, "claim"),
        "settle": SCRIPTS["end"],
        "release": with_words(6, "end"),
    }
