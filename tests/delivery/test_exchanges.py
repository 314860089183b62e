"""A message that its exchange gives to several queues: its copies never multiply."""

from __future__ import annotations

from typing import Any

import pytest
from celery.result import AsyncResult

from tests.delivery.conftest import Site
from tests.support.ledger import Ledger
from tests.support.sites import RABBITMQ, REDIS
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = pytest.mark.worker


@pytest.fixture(params=[RABBITMQ, REDIS])
def site(request, open_site):
    return open_site(request.param, exchanges=True)


def three_workers(site: Site, *queues: str) -> list[Worker]:
    return [site.worker(concurrency=4, queues=[f"{site.queue}.{queue}"]) for queue in queues]


def broadcast(site: Site, name: str, *args: Any) -> AsyncResult[Any]:
    queue: Any = site.app.amqp.queues[f"{site.queue}.all"]
    # Celery declares no Broadcast queue; without its exchange a producer on Redis sends to no one.
    return site.publish(name, *args, queue=queue.name, declare=[queue.exchange])


def lines(workers: list[Worker], task_id: str, words: str) -> int:
    """Count the lines that the workers logged about a task."""
    return sum(
        f"[{task_id}]" in line and words in line
        for worker in workers
        for line in worker.log.splitlines()
    )


def test_a_broadcast_message_runs_on_every_worker(site: Site, ledger: Ledger):
    workers = three_workers(site, "all", "all", "all")
    sent = broadcast(site, "guarded", "k", 0.5)
    wait_for(lambda: ledger.count("end", "k") >= 3, 30, "three runs")
    assert len({each.pid for each in ledger.entries("start")}) == 3
    assert lines(workers, sent.id, "received") == 3
    assert lines(workers, sent.id, "republished") == 0


def test_a_broadcast_message_with_a_key_runs_on_one_worker(site: Site, ledger: Ledger):
    """The other copies wait for it, each in the queue that it came from."""
    workers = three_workers(site, "all", "all", "all")
    sent = broadcast(site, "keyed", "k", 3.0)
    wait_for(lambda: lines(workers, sent.id, "succeeded") == 3, 60, "the run and two replays")
    assert ledger.count("start", "k") == 1
    again = lines(workers, sent.id, "is republished")
    assert 2 <= again <= 10
    # Redis cannot give one subscriber a message: there a copy waits in its worker.
    assert lines(workers, sent.id, "received") == 3 + (again if site.broker == "rabbitmq" else 0)


def test_a_topic_exchange_with_two_queues_delivers_twice_and_the_copies_stay_apart(
    site: Site, ledger: Ledger
):
    """The message runs once, in whichever queue is first; the other copy waits and is answered."""
    workers = three_workers(site, "a", "b", "b")
    sent = site.publish("guarded", "k", 3.0, queue=f"{site.queue}.a", routing_key="order.paid")
    wait_for(lambda: lines(workers, sent.id, "succeeded") == 2, 60, "the run and the replay")
    assert ledger.count("start", "k") == 1
    again = lines(workers, sent.id, "is republished")
    assert 1 <= again <= 5
    assert lines(workers, sent.id, "received") == 2 + again
