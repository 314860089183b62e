"""A site for each test: a broker, a store, a publisher in this process, and workers to watch and break."""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import kombu.transport.redis
import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from kombu import Connection

from celery_idempotent import Record, get_store
from celery_idempotent.keys import task_id_key
from celery_idempotent.records import Identity
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.servers import EmbeddedRedis, embedded_redis
from tests.support.waiting import wait_for
from tests.support.workers import Worker
from tests.worker import app as app_module

REDIS = pytest.param("redis", id="redis")
RABBITMQ = pytest.param("rabbitmq", id="rabbitmq", marks=pytest.mark.rabbitmq)

_DATABASES = 400
_APP = "tests.worker.app"


@dataclass(frozen=True)
class Gate:
    """A file that tasks wait for."""

    path: str

    def open(self) -> None:
        Path(self.path).touch()


@dataclass(frozen=True)
class Message:
    """A message taken from the broker as it is, to be delivered as often as one likes."""

    task_id: str
    body: Any
    headers: dict[str, Any]
    properties: dict[str, Any]


class States:
    """Every result that is stored for a task id from now on, in order: Celery's Redis backend announces each one."""

    def __init__(self, client: redis.Redis, task_id: str) -> None:
        self._pubsub = client.pubsub(ignore_subscribe_messages=True)
        self._pubsub.subscribe(f"celery-task-meta-{task_id}")
        self._pubsub.get_message(timeout=5)  # the subscription stands
        self._stored: list[dict[str, Any]] = []

    def stored(self) -> list[dict[str, Any]]:
        while (message := self._pubsub.get_message()) is not None:
            self._stored.append(json.loads(message["data"]))
        return self._stored

    def names(self) -> list[str]:
        return [each["status"] for each in self.stored()]

    def close(self) -> None:
        self._pubsub.close()


class Copies:
    """How many copies of one message the Redis broker has, in its queue and unacknowledged, sampled all the time."""

    def __init__(self, site: Site, task_id: str) -> None:
        self._client = redis.Redis.from_url(site.settings["broker_url"])
        self._queue = site.queue
        self._id = task_id.encode()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.most = 0

    def __enter__(self) -> Copies:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def now(self) -> int:
        with self._client.pipeline(transaction=True) as pipe:
            pipe.lrange(self._queue, 0, -1)
            pipe.hvals("unacked")
            queued, unacked = pipe.execute()
        return sum(self._id in message for message in (*queued, *unacked))

    def _watch(self) -> None:
        while not self._stop.wait(0.01):
            self.most = max(self.most, self.now())


@dataclass
class Site:
    """One app with its broker, store and queue; ``worker()`` starts workers, everything else happens in the test."""

    broker: str
    settings: dict[str, Any]
    ledger: Ledger
    app: Celery
    redis: redis.Redis
    new_queue: Callable[[], str]
    start: Callable[..., Worker]
    _states: list[States] = field(default_factory=list)

    @property
    def queue(self) -> str:
        queue: str = self.settings["task_default_queue"]
        return queue

    # -- workers -----------------------------------------------------------------------------------

    def workers(self, count: int, **options: Any) -> list[Worker]:
        """Start workers side by side; return when all of them are ready."""
        started = [self.worker(ready=False, **options) for _ in range(count)]
        for worker in started:
            _wait_until_ready(worker)
        return started

    def worker(
        self, *, prefix: str = "", claim_before_fork: bool = False, **options: Any
    ) -> Worker:
        env = app_module.environment(
            self.settings, prefix=prefix, claim_before_fork=claim_before_fork
        )
        env |= options.pop("env", {})
        return self.start(_APP, env=env, **options)

    # -- messages ----------------------------------------------------------------------------------

    def publish(self, name: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.tasks[name].apply_async(args, **options)
        return result

    def message(self, name: str, *args: Any, **options: Any) -> Message:
        """Publish where nobody listens, and take the message."""
        aside = self.new_queue()
        result = self.publish(name, *args, queue=aside, **options)
        with self.app.connection_for_read() as connection:
            channel = connection.default_channel
            found: Any = wait_for(
                lambda: self.app.amqp.queues[aside].bind(channel).get(no_ack=True),
                what="the message that was just published",
            )
            return Message(
                task_id=result.id,
                body=found.body,
                headers=dict(found.headers),
                properties={
                    "content_type": found.content_type,
                    "content_encoding": found.content_encoding,
                    "correlation_id": found.properties["correlation_id"],
                    "reply_to": found.properties["reply_to"],
                },
            )

    def deliver(self, message: Message, *, times: int = 1) -> AsyncResult[Any]:
        """Put byte copies of a message into the queue."""
        queue = self.app.amqp.queues[self.queue]
        with self.app.producer_pool.acquire(block=True) as producer:
            for _ in range(times):
                producer.publish(
                    message.body,
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    declare=[queue],
                    headers=dict(message.headers),
                    **message.properties,
                )
        return self.result(message.task_id)

    def result(self, task_id: str) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.AsyncResult(task_id)
        return result

    def states(self, task_id: str) -> States:
        """Watch what is stored for a task id from now on."""
        states = States(self.redis, task_id)
        self._states.append(states)
        return states

    def copies(self, task_id: str) -> Copies:
        """Count the copies of a message while the block lasts; on Redis only."""
        return Copies(self, task_id)

    # -- records -----------------------------------------------------------------------------------

    def record(self, name: str, key: str | None = None, *, task_id: str = "") -> Record | None:
        """Return a record by its key, or that of a task without one by its task id."""
        identity = Identity(namespace=name, key=task_id_key(task_id) if key is None else key)
        return get_store(self.app).get(identity)

    def conflicts(self, task_id: str | None = None) -> int:
        return self.ledger.count("conflicted", task_id=task_id)

    def close(self) -> None:
        for states in self._states:
            states.close()
        get_store(self.app).close()
        # A result that is collected later, with the server gone, would try for minutes to cancel its subscription.
        consumer = self.app.backend.result_consumer  # type: ignore[attr-defined]
        consumer.stop()
        consumer._pubsub = None
        self.app.close()
        self.redis.close()


def _wait_until_ready(worker: Worker) -> None:
    wait_for(
        lambda: " ready." in worker.log or not worker.running,
        60,
        lambda: f"{worker.name} to be ready; its log:\n{worker.tail()}",
    )
    assert worker.running, f"{worker.name} ended at once:\n{worker.tail()}"


# -- servers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def _server() -> Iterator[EmbeddedRedis]:
    with embedded_redis(options={"databases": str(_DATABASES)}) as server:
        yield server


@pytest.fixture(scope="session")
def _databases(_server: EmbeddedRedis) -> Iterator[str]:
    """Addresses of databases that nobody used before."""
    return (_server.url(number) for number in itertools.count())


def _open_site(
    request: pytest.FixtureRequest,
    broker: str,
    ledger: Ledger,
    start: Callable[..., Worker],
    settings: dict[str, Any],
) -> Site:
    databases: Iterator[str] = request.getfixturevalue("_databases")
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
        "worker_enable_remote_control": False,
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


# -- a site of the test's own ----------------------------------------------------------------------


@pytest.fixture(params=[REDIS, RABBITMQ])
def broker(request: pytest.FixtureRequest) -> str:
    """The broker of this run of the test."""
    name: str = request.param
    return name


@pytest.fixture
def open_site(
    request: pytest.FixtureRequest, ledger: Ledger, start_worker: Callable[..., Worker]
) -> Iterator[Callable[..., Site]]:
    """Open a site for workers that will be broken: ``open_site("redis", idempotency_lease=2)``."""
    with contextlib.ExitStack() as stack:

        def open_site(broker: str, **settings: Any) -> Site:
            site = _open_site(request, broker, ledger, start_worker, settings)
            stack.callback(site.close)
            options = settings.get("broker_transport_options", {})
            if broker == "redis" and "unacked_restore_interval" in options:
                stack.enter_context(_restoring(site))
            return site

        yield open_site


@contextlib.contextmanager
def _restoring(site: Site) -> Iterator[None]:
    """Look for unacknowledged messages every half a second, on a kombu whose workers do so every 100 s only."""
    if hasattr(kombu.transport.redis.Channel, "unacked_restore_interval"):
        yield
        return
    stop = threading.Event()
    options = {"visibility_timeout": app_module.IMPATIENT["visibility_timeout"]}

    def restore() -> None:
        with Connection(site.settings["broker_url"], transport_options=options) as connection:
            while not stop.wait(0.5):
                channel: Any = connection.default_channel
                channel.qos.restore_visible(interval=1)

    thread = threading.Thread(target=restore, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()


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


# -- a site that many tests share ------------------------------------------------------------------

_shared_workers: list[Worker] = []


@pytest.fixture(scope="session", params=[REDIS, RABBITMQ])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site with one healthy worker of four processes, which no test breaks; keys are each test's own."""
    directory = tmp_path_factory.mktemp(f"shared_{request.param}")
    ledger = Ledger(directory / "ledger.jsonl")

    def start(app: str, *, env: dict[str, str], **options: Any) -> Worker:
        worker = Worker(
            app,
            directory=directory,
            name=f"shared_{request.param}",
            env={LEDGER_VARIABLE: ledger.path, **env},
            **options,
        )
        _shared_workers.append(worker)
        return worker.start(timeout=60)

    site = _open_site(request, request.param, ledger, start, {})
    try:
        site.worker(concurrency=4)
        yield site
    finally:
        for worker in _shared_workers:
            worker.kill()
        _shared_workers.clear()
        site.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the end of the shared worker's log with the failure of a test that used it."""
    report: pytest.TestReport = yield
    if report.failed and "shared" in getattr(item, "fixturenames", ()):
        report.sections += [(f"log of {each.name}", each.tail(120)) for each in _shared_workers]
    return report


# -- small helpers, as fixtures --------------------------------------------------------------------


@pytest.fixture
def quiet_for() -> Callable[..., None]:
    """Make sure that something stays true for some seconds, derived from a lease or a timeout."""

    def quiet_for(seconds: float, condition: Callable[[], bool], what: str) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert condition(), what
            time.sleep(0.05)

    return quiet_for
