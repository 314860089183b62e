"""A stage for each test: an app whose store, broker and workers can be broken one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from celery.result import AsyncResult
from kombu import Connection

from celery_idempotent.records import State
from celery_idempotent.stores.redis.servers import SCRIPTS, SOURCES
from tests.delivery.app import make_app
from tests.support.apps import environment
from tests.support.ledger import Ledger
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.workers import Worker


class Stage:
    """An app as a test sees it: its own way to the store leads past whatever is broken."""

    def __init__(
        self,
        *,
        start_worker: Callable[..., Worker],
        ledger: Ledger,
        broker: str,
        worker_broker: str,
        backend: str | None,
        store: str,
        direct: str,
        queue: str,
        conf: dict[str, Any],
        worker_backend: str = "",
    ) -> None:
        self.ledger = ledger
        self.queue = queue
        self.broker = broker
        self._start_worker = start_worker
        self._settings = {
            "broker_url": worker_broker,
            "broker_connection_retry_on_startup": True,
            # What a lost connection to the broker costs shall be known, not found out.
            "broker_connection_timeout": 2,
            "result_backend": worker_backend or backend,
            "result_expires": 600,
            "task_default_queue": queue,
            "idempotency_store": store,
            "idempotency_sweep_interval": None,
            **conf,
        }
        own = {"broker_url": broker, "result_backend": backend, "idempotency_store": direct}
        self.client = make_app({**self._settings, **own})

    def worker(self, name: str | None = None, **options: Any) -> Worker:
        """Start a worker; ``conf`` are settings of its own."""
        env = environment({**self._settings, **options.pop("conf", {})})
        return self._start_worker("tests.delivery.app", name=name, env=env, **options)

    def send(self, task: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        return self.client.tasks[task].apply_async(args, **options)

    def open(self, gate: str) -> None:
        (self.ledger.path.parent / f"gate-{gate}").touch()

    def record(self, key: str, task: str = "work") -> Any:
        found: Any = self.client.tasks[task]
        return found.idempotency_record(key)

    def says(self, worker: Worker, *lines: str, timeout: float = 20) -> None:
        """Wait until the log of a worker has all these."""
        for line in lines:
            wait_for(
                partial(_in_log, worker, line), timeout, f"{line!r} in the log of {worker.name}"
            )

    def state(self, key: str, task: str = "work") -> State | None:
        record = self.record(key, task)
        return record.state if record else None

    def effects(self, key: str) -> int:
        return self.ledger.count("end", key)

    def starts(self, key: str) -> int:
        return self.ledger.count("start", key)

    def started(self, key: str, *, times: int = 1, timeout: float = 20) -> int:
        """Wait for a run to start; return the pid of its process."""
        entries = wait_for(
            lambda: (e := self.ledger.entries("start", key))[times - 1 :] and e,
            timeout,
            f"{key} to start ({times})",
        )
        return int(entries[times - 1].pid)

    def told(self, outcome: str, key: str) -> int:
        """How often a signal was sent."""
        return self.ledger.count(outcome, key)

    def tells(self, outcome: str, key: str) -> None:
        """Wait for a signal, which follows what it tells of; it is sent once."""
        wait_for(lambda: self.told(outcome, key), 20, f"the signal {outcome}")
        assert self.told(outcome, key) == 1

    def succeeds(self, result: AsyncResult[Any], timeout: float = 20) -> Any:
        """Wait for SUCCESS; return the value."""
        return self._ends(result, "SUCCESS", timeout)

    def fails(self, result: AsyncResult[Any], timeout: float = 20) -> Any:
        """Wait for FAILURE; return the exception."""
        return self._ends(result, "FAILURE", timeout)

    def _ends(self, result: AsyncResult[Any], state: str, timeout: float) -> Any:
        wait_for(
            lambda: result.state in ("SUCCESS", "FAILURE"),
            timeout,
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
        again = self.send(task, key)
        assert self.succeeds(again) == value
        assert self.effects(key) == 1, self.ledger.entries()

    def queued(self) -> int:
        """How many messages wait in the queue (RabbitMQ)."""
        with Connection(self.broker) as connection, connection.channel() as channel:
            return int(channel.queue_declare(self.queue, passive=True).message_count)  # type: ignore[attr-defined]


def _in_log(worker: Worker, line: str) -> bool:
    return line in worker.log


@pytest.fixture
def backend(redis_url: str, prefix: str) -> tuple[str, dict[str, Any]]:
    """A result backend that no test breaks, and its settings."""
    return redis_url, {"result_backend_transport_options": {"global_keyprefix": prefix}}


@pytest.fixture
def set_stage(
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq_url: str,
    rabbitmq_queue: str,
    private_redis: EmbeddedRedis,
    redis_proxy: Proxy,
    backend: tuple[str, dict[str, Any]],
) -> Iterator[Callable[..., Stage]]:
    """Set the stage: broker RabbitMQ, the store behind ``redis_proxy``, leases of 30 s unless told otherwise.

    The result backend is another Redis, that no test breaks; or, ``together``, it is the store.
    """
    made: list[Stage] = []

    def make(
        *,
        broker: str = rabbitmq_url,
        worker_broker: str = "",
        backend_url: str | None = backend[0],
        store: str = "",
        direct: str = private_redis.url(),
        together: bool = False,
        **conf: Any,
    ) -> Stage:
        store = store or redis_proxy.url()
        if together:
            backend_url = direct
        elif backend_url == backend[0]:
            conf = {**backend[1], **conf}
        made.append(
            Stage(
                start_worker=start_worker,
                ledger=ledger,
                broker=broker,
                worker_broker=worker_broker or broker,
                backend=backend_url,
                worker_backend=store.partition("?")[0] if together else "",
                store=store,
                direct=direct,
                queue=rabbitmq_queue,
                conf={"idempotency_lease": 30, **conf},
            )
        )
        return made[-1]

    yield make
    for each in made:
        each.client.close()


@pytest.fixture
def digests(private_redis: EmbeddedRedis) -> dict[str, bytes]:
    """By verb, the bytes that its requests contain; the server knows every script."""
    import redis

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
