"""A stand for histories: a worker whose broker, store and processes can be broken, each for one history alone."""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import urlsplit

import redis
from celery.result import AsyncResult
from kombu import Connection, Queue

from celery_idempotent import Record, get_store
from celery_idempotent.celery.delivery import identify_delivery
from tests.delivery import histories_app
from tests.support import sites
from tests.support.apps import environment
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.proxy import Proxy
from tests.support.servers import RabbitMQ, embedded_redis
from tests.support.sites import IMPATIENT
from tests.support.waiting import wait_for
from tests.support.workers import Worker

PATIENCE = 60


@dataclass
class Stand(sites.Site):
    """One app; its workers reach broker and store by proxies, this process does not."""

    module: ClassVar[Any] = histories_app

    to_broker: Proxy
    to_store: Proxy
    lead: Worker
    #: The alias of the database whose outbox this process stages in.
    outbox: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self._supervisor = threading.Thread(target=self._supervise, daemon=True)

    def begin(self) -> None:
        """Start the worker, and start it again whenever it ends, as a supervisor does."""
        self.lead.start()
        self._supervisor.start()

    def _supervise(self) -> None:
        while not self._stop.wait(0.1):
            if not self.lead.running:
                with contextlib.suppress(AssertionError):
                    self.lead.start(ready=False)

    def left_over(self) -> int:
        """Stop the worker for good, and return how many messages the broker has then."""
        self._end_supervision()
        self.lead.stop()
        return self.length(taken=True)

    def close(self) -> None:
        self._end_supervision()
        self.lead.kill()
        super().close()

    def _end_supervision(self) -> None:
        self._stop.set()
        if self._supervisor.ident is not None:
            self._supervisor.join()

    # -- canvases ------------------------------------------------------------------------------------------------------

    def label(self) -> str:
        return uuid.uuid4().hex[:12]

    def step(self, label: str, *args: Any, name: str = "step", **options: Any) -> Any:
        return self.app.tasks[name].s(*args, label).set(**options)

    def mourn(self, label: str, **options: Any) -> Any:
        return self.app.tasks["mourn"].s(label=label).set(**options)

    # -- breaking ------------------------------------------------------------------------------------------------------

    def file(self, kind: str, label: str) -> Path:
        return self.ledger.path.parent / f"{kind}-{label.replace('/', '.')}"

    def plan(self, fault: str, point: str, label: str) -> None:
        """Let the next process that comes to ``point`` of the work on ``label`` meet this fault."""
        self.file(f"{fault}-{point}", label).touch()

    def met(self, fault: str, point: str, label: str) -> int:
        return self.ledger.count(fault, f"{point} {label}")

    def close_gate(self, label: str) -> None:
        self.file("closed", label).touch()

    def open_gate(self, label: str) -> None:
        self.file("closed", label).unlink(missing_ok=True)

    def refuse(self, queue: str, *, refused: bool = True) -> None:
        """Have the broker take nothing for a queue, or take it again."""
        if self.broker == "redis":
            with redis.Redis.from_url(self.settings["broker_url"]) as client:
                client.set(queue, "not a list") if refused else client.delete(queue)
            return
        with Connection(self.settings["broker_url"]) as connection:
            channel: Any = connection.channel()
            if refused:  # to declare it as it is not is refused
                Queue(queue, durable=False, auto_delete=False)(channel).declare()
            else:
                channel.queue_delete(queue)
                self.app.amqp.queues[queue](channel).declare()

    @contextlib.contextmanager
    def refused(self) -> Iterator[str]:
        """Give a queue that the broker takes nothing for, as long as this lasts."""
        queue = self.new_queue()
        self.refuse(queue)
        yield queue
        self.refuse(queue, refused=False)

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
            lambda: f"{wanted}, is {self.effects(key)}\n{self.lead.tail()}",
        )
        assert self.effects(key) == wanted

    def find(self, name: str, task_id: str) -> Record | None:
        """Return the record of a run of this task, if it has one."""
        task: Any = self.app.tasks[name]
        identity = identify_delivery(task._definition, {}, (), {}, task_id=task_id).identity
        return get_store(self.app).get(identity)

    def ended(self, result: AsyncResult[Any]) -> bool:
        return result.state in ("SUCCESS", "FAILURE")

    def arrived(self, queue: str) -> bool:
        """Take a message from a queue where nobody listens; return whether there was one."""
        with Connection(self.settings["broker_url"]) as connection:
            bound: Any = self.app.amqp.queues[queue].bind(connection.channel())
            return bound.get(no_ack=True) is not None

    def says(self, line: str) -> None:
        """Wait until the worker writes this."""
        wait_for(lambda: line in self.lead.log, PATIENCE, lambda: f"{line}\n{self.lead.tail()}")


@contextlib.contextmanager
def open_stand(
    broker: str,
    directory: Path,
    rabbitmq: RabbitMQ | None,
    *,
    concurrency: int = 2,
    outbox: bool = False,
    together: bool = False,
    **more: Any,
) -> Iterator[Stand]:
    """Open a stand: a Redis of its own for records and results (and messages), and a worker behind proxies."""
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(embedded_redis())
        url = rabbitmq.url if rabbitmq else server.url(0)
        address = urlsplit(url)
        to_broker = stack.enter_context(
            Proxy(address.hostname or "127.0.0.1", address.port or 5672)
        )
        to_store = stack.enter_context(Proxy("127.0.0.1", server.port))
        settings = {
            "broker_url": url,
            "broker_transport_options": {"confirm_publish": True} if rabbitmq else IMPATIENT,
            "broker_connection_retry_on_startup": True,
            "broker_connection_timeout": 2,
            "task_default_queue": rabbitmq.queue() if rabbitmq else f"queue.{uuid.uuid4().hex}",
            # Not as long as an outage lasts, but known.
            "task_publish_retry_policy": {"max_retries": 1, "interval_start": 0.1},
            "worker_prefetch_multiplier": 1,
            "result_backend": f"tests.delivery.histories_app:Backend+{server.url(1)}",
            "idempotency_store": server.url(2),
            "idempotency_sweep_interval": None,
            # Longer than any history: a child that is lost costs its key no lease.
            "idempotency_lease": 600,
            "longest_pause": 2.0,
            **more,
        }
        behind = {"idempotency_store": to_store.url(2)}
        env: dict[str, str] = {}
        if together:  # the result is stored with its record
            settings["result_backend"], behind["result_backend"] = server.url(2), to_store.url(2)
        if outbox:
            from tests.sql.databases import fresh

            database = stack.enter_context(fresh("postgresql", directory, "histories"))
            env = {
                "DJANGO_SETTINGS_MODULE": "tests.sql.atomic_settings",
                "ATOMIC_DATABASES": json.dumps({"default": database}),
            }
            settings["idempotency_store"] = "django://histories"
            behind = {"idempotency_store": "django://"}
        netloc = f"{address.netloc.rpartition('@')[0]}@127.0.0.1:{to_broker.port}".lstrip("@")
        behind["broker_url"] = address._replace(netloc=netloc).geturl()
        ledger = Ledger(directory / "ledger.jsonl")
        lead = Worker(
            "tests.delivery.histories_app",
            directory=directory,
            name=broker,
            env={
                **environment({**settings, **behind}),
                LEDGER_VARIABLE: str(ledger.path),
                **env,
            },
            concurrency=concurrency,
        )
        stand = Stand(
            broker=broker,
            settings=settings,
            ledger=ledger,
            app=histories_app.make_app(settings),
            redis=redis.Redis.from_url(server.url(1)),
            new_queue=rabbitmq.queue if rabbitmq else lambda: f"aside.{uuid.uuid4().hex}",
            start=lead.start,
            to_broker=to_broker,
            to_store=to_store,
            lead=lead,
            outbox="histories" if outbox else "",
        )
        stack.callback(stand.close)
        if not rabbitmq:
            stack.enter_context(sites.restoring(stand))
        stand.begin()
        yield stand
