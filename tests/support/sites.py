"""What the sites of all worker tests have in common: one app with its broker, its store, its queue and its workers."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import kombu.transport.redis
import pytest
import redis
from celery import Celery
from celery.result import AsyncResult
from kombu import Connection

from celery_idempotent import get_store
from tests.support.apps import close_app, environment
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.waiting import wait_for
from tests.support.workers import Worker

REDIS = pytest.param("redis", id="redis")
RABBITMQ = pytest.param("rabbitmq", id="rabbitmq", marks=pytest.mark.rabbitmq)
#: Where the broker decides nothing: that RabbitMQ delivers to the same code is shown by tests/delivery.
RABBITMQ_TOO = pytest.param(
    "rabbitmq", id="rabbitmq", marks=[pytest.mark.rabbitmq, pytest.mark.wide]
)

#: Redis as a broker gives back what was not acknowledged for two seconds, and looks every second. A worker that is
#: killed or cut off while it looks keeps the others from it for five seconds (by default: five minutes).
IMPATIENT = {
    "visibility_timeout": 2,
    "unacked_restore_interval": 1,
    "unacked_restore_throttle": 1,
    "unacked_mutex_expire": 5,
}

#: Workers that live longer than a test: the end of their logs is shown with a failure.
SHARED_WORKERS: list[Worker] = []


@dataclass(frozen=True)
class Gate:
    """A file that tasks wait for."""

    path: str

    def open(self) -> None:
        Path(self.path).touch()


@dataclass(frozen=True)
class Message:
    """A message as a broker has it, to be delivered as often as one likes."""

    task_id: str
    body: Any
    headers: dict[str, Any]
    properties: dict[str, Any]


@dataclass
class Site:
    """One app with its broker, store and queue; ``worker()`` starts workers, all else happens in the test's process."""

    #: The module of the app: ``make_app(settings)`` makes it here, and a worker makes it from its environment.
    module: ClassVar[Any]

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

    def worker(self, *, wanted: dict[str, Any] | None = None, **options: Any) -> Worker:
        """Start a worker on this site's queue; ``wanted`` are more arguments of :func:`environment`."""
        env = environment(self.settings, **wanted or {}) | options.pop("env", {})
        return self.start(self.module.__name__, env=env, **{"timeout": 60, **options})

    def publish(self, name: str, *args: Any, **options: Any) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.tasks[name].apply_async(args, **options)
        return result

    def result(self, task_id: str) -> AsyncResult[Any]:
        result: AsyncResult[Any] = self.app.AsyncResult(task_id)
        return result

    def message(self, name: str, *args: Any, **options: Any) -> Message:
        """Publish where nobody listens, and take the message."""
        aside = self.new_queue()
        result = self.publish(name, *args, queue=aside, **options)
        (message,) = self.take(aside, 1)
        assert message.task_id == result.id
        return message

    def take(self, queue: str, count: int) -> list[Message]:
        """Take messages from a queue where nobody listens."""
        with self.app.connection_for_read() as connection:
            bound: Any = self.app.amqp.queues[queue].bind(connection.default_channel)
            found: list[Any] = [
                wait_for(partial(bound.get, no_ack=True), 30, "a message that was published")
                for _ in range(count)
            ]
        known = ("correlation_id", "reply_to")
        return [
            Message(
                task_id=each.headers["id"],
                body=each.body,
                headers=dict(each.headers),
                properties={
                    "content_type": each.content_type,
                    "content_encoding": each.content_encoding,
                    **{name: each.properties[name] for name in known},
                },
            )
            for each in found
        ]

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

    def length(self, *, taken: bool = False) -> int:
        """Return how many messages wait in the queue; on Redis also those that were ``taken``, and not acknowledged."""
        if self.broker == "redis":
            with redis.Redis.from_url(self.settings["broker_url"]) as client:
                return int(client.llen(self.queue)) + taken * int(client.hlen("unacked"))
        with self.app.connection_for_read() as connection:
            bound: Any = self.app.amqp.queues[self.queue].bind(connection.default_channel)
            return int(bound.queue_declare(passive=False).message_count)

    def close(self) -> None:
        get_store(self.app).close()
        close_app(self.app)
        self.redis.close()


S = TypeVar("S", bound=Site)


def open_site(
    kind: type[S],
    request: pytest.FixtureRequest,
    broker: str,
    ledger: Ledger,
    start: Callable[..., Worker],
    settings: dict[str, Any],
) -> S:
    """Open a site on databases and a queue of its own; whoever opens it closes it."""
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
    return kind(
        broker=broker,
        settings=settings,
        ledger=ledger,
        app=kind.module.make_app(settings),
        redis=redis.Redis.from_url(backend),
        new_queue=new_queue,
        start=start,
    )


@contextlib.contextmanager
def share(
    kind: type[S],
    request: pytest.FixtureRequest,
    factory: pytest.TempPathFactory,
    broker: str,
    **settings: Any,
) -> Iterator[S]:
    """Open a site for many tests, each with keys of its own; its workers live until all are done."""
    directory = factory.mktemp(f"shared_{broker}")
    ledger = Ledger(directory / "ledger.jsonl")
    workers: list[Worker] = []

    def start(app: str, *, env: dict[str, str], timeout: float, **options: Any) -> Worker:
        env = {LEDGER_VARIABLE: str(ledger.path), **env}
        name = f"shared_{broker}{uuid.uuid4().hex[:4]}"
        worker = Worker(app, directory=directory, name=name, env=env, **options)
        workers.append(worker)
        SHARED_WORKERS.append(worker)
        return worker.start(timeout=timeout)

    site = open_site(kind, request, broker, ledger, start, settings)
    try:
        yield site
    finally:
        for worker in workers:
            worker.kill()
            SHARED_WORKERS.remove(worker)
        site.close()


@contextlib.contextmanager
def restoring(site: Site) -> Iterator[None]:
    """Look for unacknowledged messages every half a second, on a kombu whose workers do so every 100 s only."""
    if hasattr(kombu.transport.redis.Channel, "unacked_restore_interval"):
        yield
        return
    stop = threading.Event()
    options = {"visibility_timeout": IMPATIENT["visibility_timeout"]}

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
