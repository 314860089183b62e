"""A worker whose broker, followers and processes can be broken, for many tests, each with labels of its own."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from celery.result import AsyncResult
from kombu import Connection, Queue

from celery_idempotent import Record, get_store
from celery_idempotent.celery.delivery import identify_delivery
from tests.delivery.histories_app import CONF, make_app
from tests.support.apps import close_app
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.proxy import Proxy
from tests.support.servers import EmbeddedRedis, RabbitMQ, embedded_redis
from tests.support.sites import IMPATIENT
from tests.support.waiting import wait_for
from tests.support.workers import Worker

PATIENCE = 40


class Stand:
    """One app; its workers reach the broker through ``proxy``, this process does not."""

    def __init__(
        self,
        broker: str,
        directory: Path,
        server: EmbeddedRedis,
        proxy: Proxy,
        conf: dict[str, Any],
        through: str,
        pool: str,
        concurrency: int,
    ) -> None:
        self.broker, self.directory, self.server, self.proxy = broker, directory, server, proxy
        self.ledger = Ledger(directory / "ledger.jsonl")
        self.conf = conf
        self.app = make_app(conf)
        self.redis = redis.Redis.from_url(server.url(1))
        env = {
            CONF: json.dumps({**conf, "broker_url": through}),
            LEDGER_VARIABLE: str(self.ledger.path),
        }
        self.worker = Worker(
            "tests.delivery.histories_app",
            directory=directory,
            name=f"{broker}.{pool}",
            env=env,
            pool=pool,
            concurrency=concurrency,
        )

        self._stop = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)

    def start(self) -> None:
        """Start the worker, and start it again whenever it ends, as a supervisor does."""
        self.worker.start()
        self._supervisor.start()

    def _supervise(self) -> None:
        while not self._stop.wait(0.1):
            if not self.worker.running:
                with contextlib.suppress(AssertionError):
                    self.worker.start(ready=False)

    def close(self) -> None:
        self._stop.set()
        if self._supervisor.ident is not None:
            self._supervisor.join()
        self.worker.kill()
        close_app(self.app)
        self.redis.close()

    # -- canvases ------------------------------------------------------------------------------------------------------

    def label(self) -> str:
        return uuid.uuid4().hex[:12]

    def step(self, label: str, *args: Any, name: str = "step", **options: Any) -> Any:
        return self.app.tasks[name].s(*args, label).set(**options)

    def mourn(self, label: str, **options: Any) -> Any:
        return self.app.tasks["mourn"].s(label=label).set(**options)

    # -- breaking ------------------------------------------------------------------------------------------------------

    def close_gate(self, label: str) -> None:
        self._file("closed", label).touch()

    def open_gate(self, label: str) -> None:
        self._file("closed", label).unlink()

    def crash(self, point: str, label: str) -> None:
        """Let the next process that comes to ``point`` of the work on ``label`` die there."""
        self._file(f"crash-{point}", label).touch()

    def crashed(self, point: str, label: str) -> bool:
        return self.ledger.count("crash", f"{point} {label}") > 0

    def _file(self, kind: str, label: str) -> Path:
        return self.directory / f"{kind}-{label.replace('/', '.')}"

    @contextlib.contextmanager
    def refused(self) -> Iterator[str]:
        """Give a queue that the broker takes nothing for, as long as this lasts."""
        name = f"aside.{uuid.uuid4().hex}"
        if self.broker == "redis":
            client = redis.Redis.from_url(self.server.url(0))
            client.set(name, "not a list")
            yield name
            client.delete(name)
            client.close()
        else:
            # Another one of this name: to declare it as it is not is refused.
            self._declare(Queue(name, durable=False, auto_delete=False))
            yield name
            with Connection(self.conf["broker_url"]) as connection:
                channel: Any = connection.channel()
                channel.queue_delete(name)
            self._declare(self.app.amqp.queues[name])

    def _declare(self, queue: Any) -> None:
        with Connection(self.conf["broker_url"]) as connection:
            queue(connection.channel()).declare()

    def arrived(self, queue: str, count: int = 1) -> list[str]:
        """Wait for messages in a queue where nobody listens; return their task ids."""
        found: list[str] = []
        with Connection(self.conf["broker_url"]) as connection:
            bound: Any = self.app.amqp.queues[queue].bind(connection.channel())

            def take() -> bool:
                message = bound.get(no_ack=True)
                if message is not None:
                    found.append(message.headers["id"])
                return len(found) >= count

            wait_for(take, PATIENCE, lambda: f"{count} messages, are {found}\n{self.worker.tail()}")
        return found

    # -- looking -------------------------------------------------------------------------------------------------------

    def effects(self, text: str) -> dict[str, int]:
        """Return how often each label with ``text`` took effect."""
        entries = self.ledger.entries("effect")
        return dict(Counter(each.key for each in entries if text in each.key))

    def takes_effect(self, *labels: str) -> None:
        """Wait until all of these took effect, each once."""
        key = labels[0].split("/")[0]
        wanted = dict.fromkeys(labels, 1)
        wait_for(
            lambda: self.effects(key).keys() == wanted.keys(),
            PATIENCE,
            lambda: f"{wanted}, is {self.effects(key)}\n{self.worker.tail()}",
        )
        assert self.effects(key) == wanted

    def record(self, result: AsyncResult[Any]) -> Record:
        """Return the record of a step that ran, late or early, or of one that fails for good."""
        found = (self.find(name, result) for name in ("step", "step_early", "refuse"))
        record = next(filter(None, found), None)
        assert record is not None, f"no record of {result.id}"
        return record

    def find(self, name: str, result: AsyncResult[Any]) -> Record | None:
        """Return the record of a run of this task, if it has one."""
        task: Any = self.app.tasks[name]
        identity = identify_delivery(task._definition, {}, (), {}, task_id=result.id).identity
        return get_store(self.app).get(identity)

    def failures(self, result: AsyncResult[Any]) -> int:
        return self.ledger.count("failure", task_id=result.id)

    def waiting(self) -> int:
        """Return how many messages are in the queue, or given to somebody."""
        queue = self.conf["task_default_queue"]
        if self.broker == "redis":
            with redis.Redis.from_url(self.server.url(0)) as client:
                return int(client.llen(queue)) + int(client.hlen("unacked"))
        with Connection(self.conf["broker_url"]) as connection:
            bound: Any = self.app.amqp.queues[queue].bind(connection.channel())
            return int(bound.queue_declare(passive=True).message_count)

    def says(self, line: str, since: int) -> None:
        """Wait until the worker writes this."""
        wait_for(
            lambda: line in self.worker.log[since:],
            PATIENCE,
            lambda: f"{line}\n{self.worker.tail()}",
        )


@contextlib.contextmanager
def open_stand(
    broker: str,
    directory: Path,
    rabbitmq: RabbitMQ | None,
    *,
    pool: str = "prefork",
    concurrency: int = 2,
    **conf: Any,
) -> Iterator[Stand]:
    """Open a stand: a Redis of its own for records and results (and messages), a proxy before the broker, a worker."""
    kept = {"appendfsync": "always"}
    with embedded_redis(persistent=True, options=kept) as server:
        if rabbitmq is None:
            proxy = Proxy("127.0.0.1", server.port)
            url, through = server.url(0), proxy.url(0)
            options: dict[str, Any] = IMPATIENT
        else:
            parts = rabbitmq.url.split("@")
            host, port = parts[1].split("/")[0].split(":")
            proxy = Proxy(host, int(port))
            url, through = (
                rabbitmq.url,
                rabbitmq.url.replace(f"{host}:{port}", f"127.0.0.1:{proxy.port}"),
            )
            options = {"confirm_publish": True}
        queue = rabbitmq.queue() if rabbitmq else f"queue.{uuid.uuid4().hex}"
        conf = {
            "broker_url": url,
            "broker_transport_options": options,
            "task_default_queue": queue,
            "result_backend": f"tests.delivery.histories_app:Backend+{server.url(1)}",
            "idempotency_store": server.url(2),
            **conf,
        }

        with proxy:
            stand = Stand(broker, directory, server, proxy, conf, through, pool, concurrency)
            try:
                stand.start()
                yield stand
            finally:
                stand.close()
