"""A site for each kind of test: a broker, a store, a publisher in this process, workers to watch and break."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import celery
import pytest
import redis

from celery_idempotent import Record, get_store
from celery_idempotent.keys.rules import canonical
from celery_idempotent.records import Identity
from tests.policies import app as app_module
from tests.support import sites
from tests.support.ledger import Ledger
from tests.support.sites import RABBITMQ_TOO, REDIS, Message
from tests.support.waiting import wait_for
from tests.support.workers import Worker

#: A result, or whatever a test waits for, is there after so many seconds, or never.
PATIENCE = 30


@dataclass
class Site(sites.Site):
    """A site whose workers write down every message that arrives."""

    module: ClassVar[Any] = app_module

    def __post_init__(self) -> None:
        self._arrived = app_module.receipts(self.ledger)

    # -- messages ------------------------------------------------------------------------------------------------------

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
        found = self._arrived.read()
        return [each for each in found if text in each["id"] or text in each["body"]]

    def received(self, task_id: str) -> int:
        """Return how often a message with this task id arrived."""
        return sum(each["id"] == task_id for each in self._arrived.read())

    def receipt(self, task_id: str) -> dict[str, Any]:
        """Return the first message with this task id, as soon as it has arrived."""
        first, *_ = wait_for(
            lambda: [each for each in self.receipts(task_id) if each["id"] == task_id],
            PATIENCE,
            f"the message of {task_id}",
        )
        return first

    def deliver_again(self, receipt: dict[str, Any]) -> None:
        """Put a byte copy of a message that arrived into the queue."""
        known = ("content_type", "content_encoding", "correlation_id", "reply_to")
        properties = {name: receipt[name] for name in known}
        self.deliver(Message(receipt["id"], receipt["body"], receipt["headers"], properties))

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
        # Celery >= 5.7 acknowledges what was lost after its result was stored, as the settle does here. Else, or with
        # something to send, the message is to come back.
        sending = {
            each["id"] for each in self.receipts(text) if any(json.loads(each["body"])[2].values())
        }
        stored = {
            e.task_id for e in entries if e.phase == "crash" and celery.VERSION[:2] >= (5, 7)
        } - sending
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


@pytest.fixture
def open_site(
    request: pytest.FixtureRequest, ledger: Ledger, start_worker: Callable[..., Worker]
) -> Iterator[Callable[..., Site]]:
    """Open a site of the test's own: ``open_site("redis", idempotency_lease=2)``."""
    with contextlib.ExitStack() as stack:

        def open_site(broker: str, **settings: Any) -> Site:
            site = sites.open_site(Site, request, broker, ledger, start_worker, settings)
            stack.callback(site.close)
            return site

        yield open_site


@pytest.fixture(scope="session")
def on_redis(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site on Redis, with one worker of four processes; keys are each test's own."""
    with sites.share(Site, request, tmp_path_factory, "redis") as site:
        site.worker(concurrency=4)
        yield site


@pytest.fixture(scope="session")
def on_rabbitmq(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """As ``on_redis``, with RabbitMQ as the broker."""
    with sites.share(Site, request, tmp_path_factory, "rabbitmq") as site:
        site.worker(concurrency=4)
        yield site


@pytest.fixture(params=[REDIS, RABBITMQ_TOO])
def shared(request: pytest.FixtureRequest) -> Site:
    """Either of them."""
    site: Site = request.getfixturevalue(f"on_{request.param}")
    return site
