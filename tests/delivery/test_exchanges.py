"""A message that its exchange gives to several queues: its copies never multiply."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from celery.result import AsyncResult

from tests.delivery import app as app_module
from tests.support import sites
from tests.support.ledger import Ledger
from tests.support.sites import RABBITMQ, REDIS
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = pytest.mark.worker


class Site(sites.Site):
    module: ClassVar[Any] = app_module

    def three_workers(self, *queues: str) -> list[Worker]:
        return [
            self.worker(name=f"w{n}", concurrency=4, queues=[f"{self.queue}.{queue}"])
            for n, queue in enumerate(queues)
        ]

    def broadcast(self, name: str, *args: Any) -> AsyncResult[Any]:
        queue: Any = self.app.amqp.queues[f"{self.queue}.all"]
        # Celery declares no Broadcast queue; without its exchange a producer on Redis sends to no one.
        return self.publish(name, *args, queue=queue.name, declare=[queue.exchange])


@pytest.fixture
def site(
    request: pytest.FixtureRequest, ledger: Ledger, start_worker: Callable[..., Worker]
) -> Iterator[Site]:
    settings = {"worker_enable_remote_control": False, "exchanges": True}
    site = sites.open_site(Site, request, request.param, ledger, start_worker, settings)
    yield site
    site.close()


def lines(workers: list[Worker], task_id: str, words: str) -> int:
    """Count the lines that the workers logged about a task."""
    return sum(
        f"[{task_id}]" in line and words in line
        for worker in workers
        for line in worker.log.splitlines()
    )


@pytest.mark.parametrize("site", [RABBITMQ, REDIS], indirect=True)
def test_a_broadcast_message_runs_on_every_worker(site: Site, ledger: Ledger):
    workers = site.three_workers("all", "all", "all")
    sent = site.broadcast("guarded", "k", 0.5)
    wait_for(lambda: ledger.count("end", "k") >= 3, 30, "three runs")
    assert len({each.pid for each in ledger.entries("start")}) == 3
    assert lines(workers, sent.id, "received") == 3
    assert lines(workers, sent.id, "republished") == 0


@pytest.mark.parametrize("site", [RABBITMQ, REDIS], indirect=True)
def test_a_broadcast_message_with_a_key_runs_on_one_worker(site: Site, ledger: Ledger):
    """The other copies wait for it, each in the queue that it came from."""
    workers = site.three_workers("all", "all", "all")
    sent = site.broadcast("keyed", "k", 3.0)
    wait_for(lambda: lines(workers, sent.id, "succeeded") == 3, 60, "the run and two replays")
    assert ledger.count("start", "k") == 1
    again = lines(workers, sent.id, "is republished")
    assert 2 <= again <= 10
    # Redis cannot give one subscriber a message: there a copy waits in its worker.
    assert lines(workers, sent.id, "received") == 3 + (again if site.broker == "rabbitmq" else 0)


@pytest.mark.parametrize("site", [RABBITMQ, REDIS], indirect=True)
def test_a_topic_exchange_with_two_queues_delivers_twice_and_the_copies_stay_apart(
    site: Site, ledger: Ledger
):
    """The message runs once, in whichever queue is first; the other copy waits and is answered."""
    workers = site.three_workers("a", "b", "b")
    sent = site.publish("guarded", "k", 3.0, queue=f"{site.queue}.a", routing_key="order.paid")
    wait_for(lambda: lines(workers, sent.id, "succeeded") == 2, 60, "the run and the replay")
    assert ledger.count("start", "k") == 1
    again = lines(workers, sent.id, "is republished")
    assert 1 <= again <= 5
    assert lines(workers, sent.id, "received") == 2 + again
