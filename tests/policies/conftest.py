"""A site for each kind of test: a broker, a store, a publisher in this process, workers to watch and break."""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from celery.result import AsyncResult

from celery_idempotent import Record, get_store
from celery_idempotent.keys import canonical
from celery_idempotent.records import Identity
from tests.policies import app as app_module
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.servers import EmbeddedRedis, embedded_redis
from tests.support.waiting import wait_for
from tests.support.workers import Worker

REDIS = pytest.param("redis", id="redis")
RABBITMQ = pytest.param("rabbitmq", id="rabbitmq", marks=pytest.mark.rabbitmq)

#: A result, or whatever a test waits for, is there after so many seconds, or never.
PATIENCE = 30

_APP = "tests.policies.app"


@dataclass(frozen=True)
class Gate:
    """A file that tasks wait for."""

    path: str

    def open(self) -> None:
        Path(self.path).touch()


@dataclass
class Site:
    """One app with its broker, store and queue."""

    broker: str
    settings: dict[str, Any]
    ledger: Ledger
    app: Celery
    redis: redis.Redis
    new_queue: Callable[[], str]
    start: Callable[..., Worker]

    @property
    def queue(self) -> str:
        queue: str = self.settings["task_default_queue"]
        return queue

    def worker(self, *, prefix: str = "", **options: Any) -> Worker:
        env = app_module.environment(self.settings, prefix=prefix) | options.pop("env", {})
        return self.start(_APP, env=env, timeout=60, **options)

    # -- messages ------------------------------------------------------------------------------------------------------

    def publish(self, name: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.tasks[name].apply_async(args, **options)
        return result

    def result(self, task_id: str) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.AsyncResult(task_id)
        return result

    def length(self, queue: str | None = None) -> int:
        """Return how many messages wait in a queue."""
        queue = queue or self.queue
        if self.broker == "redis":
            with redis.Redis.from_url(self.settings["broker_url"]) as client:
                return int(client.llen(queue))
        with self.app.connection_for_read() as connection:
            bound: Any = self.app.amqp.queues[queue].bind(connection.default_channel)
            return int(bound.queue_declare(passive=False).message_count)

    def receipts(self, text: str = "") -> list[dict[str, Any]]:
        """Return the messages that arrived at workers, in order, those with ``text`` in their id or body."""
        found = app_module.receipts(self.ledger)
        return [each for each in found if text in each["id"] or text in each["body"]]

    def received(self, task_id: str) -> int:
        """Return how often a message with this task id arrived."""
        return sum(each["id"] == task_id for each in app_module.receipts(self.ledger))

    def receipt(self, task_id: str) -> dict[str, Any]:
        """Return the first message with this task id, as soon as it has arrived."""
        first, *_ = wait_for(
            lambda: [each for each in self.receipts(task_id) if each["id"] == task_id],
            PATIENCE,
            f"the message of {task_id}",
        )
        return first

    def deliver(self, receipt: dict[str, Any]) -> None:
        """Put a byte copy of a message into the queue."""
        queue = self.app.amqp.queues[self.queue]
        known = ("content_type", "content_encoding", "correlation_id", "reply_to")
        with self.app.producer_pool.acquire(block=True) as producer:
            producer.publish(
                receipt["body"],
                exchange=queue.exchange,
                routing_key=queue.routing_key,
                declare=[queue],
                headers=dict(receipt["headers"]),
                **{name: receipt[name] for name in known},
            )

    @contextlib.contextmanager
    def doubling(self, text: str) -> Iterator[None]:
        """Deliver each message with ``text`` a second time as soon as it arrives."""
        stop = threading.Event()

        def double() -> None:
            seen: set[str] = set()
            while not stop.wait(0.01):
                for receipt in self.receipts(text):
                    if receipt["id"] not in seen:
                        seen.add(receipt["id"])
                        self.deliver(receipt)

        thread = threading.Thread(target=double, daemon=True)
        thread.start()
        yield
        stop.set()
        thread.join()

    # -- what happened -------------------------------------------------------------------------------------------------

    def crash(self, point: str, label: str) -> None:
        """Let the next process that comes to ``point`` of the work on ``label`` die there."""
        app_module.crash_file(self.ledger, point, label).touch()

    def idle(self, text: str) -> None:
        """Wait until all messages with ``text`` have arrived and are done, and what they sent, too."""
        while True:
            wait_for(
                lambda: not self._unfinished(text),
                PATIENCE,
                lambda: f"the end of {self._unfinished(text)}, ledger: {self.ledger.entries()}",
                interval=0.05,
            )
            before = len(self.receipts(text))
            # The queue is in order: what was sent before this has arrived when this has.
            self.receipt(self.publish("fence").id)
            if len(self.receipts(text)) == before and not self._unfinished(text):
                return

    def _unfinished(self, text: str) -> list[str]:
        arrived = Counter(each["id"] for each in self.receipts(text))
        entries = self.ledger.entries()
        ended = Counter(e.task_id for e in entries if e.phase in {"postrun", "crash", "revoked"})
        done = {e.task_id for e in entries if e.phase in {"postrun", "revoked"}}
        # Celery >= 5.7 acknowledges what was lost after its result was stored; else the message is to come back.
        stored = {e.task_id for e in entries if e.phase == "crash" and e.key[:6] != "settle"}
        return [
            task_id
            for task_id, count in arrived.items()
            if ended[task_id] < count or task_id not in done | stored
        ]

    def effects(self, text: str) -> Counter[str]:
        """Return how often each label with ``text`` took effect."""
        found = self.ledger.entries("effect")
        return Counter(each.key for each in found if text in each.key)

    def noted(self, phase: str, key: str | None = None, task_id: str | None = None) -> None:
        """Wait until the ledger has this."""
        wait_for(
            lambda: self.ledger.count(phase, key, task_id),
            PATIENCE,
            lambda: f"{phase} of {key or task_id} in {self.ledger.entries()}",
        )

    def record(self, name: str, key: str) -> Record | None:
        identity = Identity(namespace=name, key=canonical(key, task=name))
        return get_store(self.app).get(identity)

    def close(self) -> None:
        # An AsyncResult that dies later would say goodbye to a server that is gone by then.
        gc.collect()
        backend: Any = self.app.backend
        backend.result_consumer.subscribed_to.clear()
        get_store(self.app).close()
        self.app.close()
        self.redis.close()


# -- servers -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _server() -> Iterator[EmbeddedRedis]:
    with embedded_redis(options={"databases": "400"}) as server:
        yield server


@pytest.fixture(scope="session")
def databases(_server: EmbeddedRedis) -> Iterator[str]:
    """Addresses of databases that nobody used before."""
    return (_server.url(number) for number in itertools.count())


def _open_site(
    request: pytest.FixtureRequest,
    broker: str,
    ledger: Ledger,
    start: Callable[..., Worker],
    settings: dict[str, Any],
) -> Site:
    databases: Iterator[str] = request.getfixturevalue("databases")
    if broker == "redis":
        broker_url, new_queue = next(databases), lambda: f"queue.{uuid.uuid4().hex}"
    else:
        rabbitmq = request.getfixturevalue("rabbitmq")
        broker_url, new_queue = rabbitmq.url, rabbitmq.queue
    backend = next(databases)
    settings = {
        "broker_url": broker_url,
        "result_backend": backend,
        "task_default_queue": new_queue(),
        "task_track_started": True,
        "worker_prefetch_multiplier": 1,
        "broker_connection_retry_on_startup": True,
        "idempotency_lease": 30,
        **settings,
    }
    return Site(
        broker=broker,
        settings=settings,
        ledger=ledger,
        app=app_module.make_app(settings),
        redis=redis.Redis.from_url(backend),
        new_queue=new_queue,
        start=start,
    )


@pytest.fixture
def open_site(
    request: pytest.FixtureRequest, ledger: Ledger, start_worker: Callable[..., Worker]
) -> Iterator[Callable[..., Site]]:
    """Open a site of the test's own: ``open_site("redis", idempotency_lease=2)``."""
    with contextlib.ExitStack() as stack:

        def open_site(broker: str, **settings: Any) -> Site:
            site = _open_site(request, broker, ledger, start_worker, settings)
            stack.callback(site.close)
            return site

        yield open_site


# -- a site that many tests share --------------------------------------------------------------------------------------

_shared_workers: list[Worker] = []


@contextlib.contextmanager
def _shared(
    request: pytest.FixtureRequest, factory: pytest.TempPathFactory, broker: str
) -> Iterator[Site]:
    directory = factory.mktemp(f"shared_{broker}")
    ledger = Ledger(directory / "ledger.jsonl")

    def start(app: str, *, env: dict[str, str], timeout: float, **options: Any) -> Worker:
        env = {LEDGER_VARIABLE: str(ledger.path), **env}
        name = f"shared_{broker}{uuid.uuid4().hex[:4]}"
        worker = Worker(app, directory=directory, name=name, env=env, **options)
        _shared_workers.append(worker)
        return worker.start(timeout=timeout)

    site = _open_site(request, broker, ledger, start, {})
    try:
        site.worker(concurrency=4)
        yield site
    finally:
        for worker in _shared_workers:
            worker.kill()
        site.close()


@pytest.fixture(scope="session")
def on_redis(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site on Redis, with one worker of four processes; keys are each test's own."""
    with _shared(request, tmp_path_factory, "redis") as site:
        yield site


@pytest.fixture(scope="session")
def on_rabbitmq(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """As ``on_redis``, with RabbitMQ as the broker."""
    with _shared(request, tmp_path_factory, "rabbitmq") as site:
        yield site


@pytest.fixture(params=[REDIS, RABBITMQ])
def shared(request: pytest.FixtureRequest) -> Site:
    """Either of them."""
    site: Site = request.getfixturevalue(f"on_{request.param}")
    return site


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the end of the shared workers' logs with the failure of a test that used them."""
    report: pytest.TestReport = yield
    if report.failed and {"shared", "on_redis"} & set(getattr(item, "fixturenames", ())):
        report.sections += [(f"log of {each.name}", each.tail(80)) for each in _shared_workers]
    return report


# -- small helpers -----------------------------------------------------------------------------------------------------


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Gate]:
    """A closed gate; it opens at the end of the test, so that nothing waits on."""
    gate = Gate(str(tmp_path / "gate"))
    yield gate
    gate.open()


@pytest.fixture
def key() -> str:
    """A key that nobody else uses."""
    return f"key.{uuid.uuid4().hex}"


@pytest.fixture
def quiet_for() -> Callable[..., None]:
    """Make sure that something stays true for some seconds."""

    def quiet_for(seconds: float, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert condition(), what
            time.sleep(0.05)

    return quiet_for
