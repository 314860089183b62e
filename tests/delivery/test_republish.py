"""A message that may not run yet is published again: as it was, by the ways that its broker has for it."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from celery import __version__ as celery_version

from celery_idempotent.records import Identity
from celery_idempotent.stores import get_store
from tests.delivery.conftest import Site
from tests.support import sites
from tests.support.proxy import Proxy
from tests.support.records import claim_key
from tests.support.sites import RABBITMQ
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = pytest.mark.worker

#: Celery can consume quorum queues of RabbitMQ, and then delays messages in RabbitMQ itself.
DELAYED = tuple(map(int, celery_version.split(".")[:2])) >= (5, 5)


class Cut(Site):
    """A site whose worker reaches its store by a proxy."""

    proxy: Proxy
    only: Worker


@pytest.fixture(
    scope="module", params=[pytest.param("redis", id="redis", marks=pytest.mark.wide), RABBITMQ]
)
def cut(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cut]:
    """Four processes; on RabbitMQ with a topic exchange and a quorum queue that gives nothing out a third time."""
    server = urlsplit(next(request.getfixturevalue("databases")))
    on_rabbitmq = request.param == "rabbitmq"
    queue = request.getfixturevalue("rabbitmq").queue() if on_rabbitmq else uuid.uuid4().hex
    quorum = {
        queue: {
            "exchange": f"topic.{queue}",
            "exchange_type": "topic",
            "routing_key": queue,
            "queue_arguments": {"x-queue-type": "quorum", "x-delivery-limit": 2} if DELAYED else {},
        }
    }
    with Proxy(str(server.hostname), int(server.port or 0)) as proxy:
        settings = {
            "accept_content": ["json", "pickle"],
            "idempotency_store": proxy.url(int(server.path[1:])),
            "task_default_queue": queue,
            "worker_enable_remote_control": False,
            **({"task_queues": quorum} if on_rabbitmq else {}),
        }
        with sites.share(Cut, request, tmp_path_factory, request.param, **settings) as site:
            site.proxy, site.only = proxy, site.worker(concurrency=4)
            yield site


@pytest.mark.parametrize("name", ["guarded", "guarded_early"])
def test_a_message_keeps_what_it_was_published_with(cut, key, name):
    """A set is nothing that JSON, the serializer of its task, could write."""
    task_id = str(uuid.uuid4())
    store, identity = get_store(cut.app), Identity(namespace=name, key=f"@{task_id}")
    token = claim_key(store, identity, lease_ms=60_000).token
    options = {"serializer": "pickle", "delivery_mode": 1, "priority": 3}
    cut.publish(name, key, 0.0, set(), task_id=task_id, **options)
    wait_for(lambda: cut.conflicts(task_id) >= 2, 30, "it to come round twice")
    received = cut.ledger.entries("received", task_id=task_id)
    assert {each.key for each in received} == {"1 3 application/x-python-serialize"}
    store.release(identity, token=token)
    wait_for(lambda: cut.ledger.count("end", key), 30, "it to run")
    assert f"[{task_id}] cannot be published" not in cut.only.log
    assert cut.ledger.count("start", key) == 1


@pytest.mark.skipif(not DELAYED, reason="this Celery delays no messages in RabbitMQ")
def test_no_message_is_lost_in_an_outage_of_the_store(cut, key):
    """With late and with early acks, whatever the queue makes of what comes back again and again.

    ``CELERY_IDEMPOTENT_SOAK=1000`` for a longer one.
    """
    rounds = 4 if int(os.environ.get("CELERY_IDEMPOTENT_SOAK", "0")) >= 1000 else 1
    cut.proxy.refuse()
    keys = [f"{key}/{n}" for n in range(8)]
    sent = [
        cut.publish("guarded" if n % 2 else "guarded_early", each) for n, each in enumerate(keys)
    ]
    for result in sent:
        said = f"[{result.id}] did not run: store error ({rounds} so far)"
        wait_for(lambda said=said: said in cut.only.log, 60 * rounds, said)
    cut.proxy.heal()
    for each in keys:
        wait_for(lambda each=each: cut.ledger.count("end", each), 30, f"{each} to run")
    assert [cut.ledger.count("start", each) for each in keys] == [1] * 8
    assert not [each for each in sent if f"[{each.id}] cannot be published" in cut.only.log]
