"""A site for each test: a broker, a store, a publisher in this process, and workers to watch and break."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from celery_idempotent import Record, get_store
from celery_idempotent.records import Identity
from tests.delivery import app as app_module
from tests.support import sites
from tests.support.ledger import Ledger
from tests.support.sites import IMPATIENT, RABBITMQ, RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for
from tests.support.workers import Worker


@dataclass
class Site(sites.Site):
    """A site whose workers may be broken."""

    module: ClassVar[Any] = app_module

    def record(self, name: str, key: str) -> Record | None:
        return get_store(self.app).get(Identity(namespace=name, key=key))

    def idle(self, *task_ids: str) -> None:
        """Wait until all messages of these tasks that were sent by now are done with."""
        # The queue is in order: what was sent before this has arrived when this has.
        self.publish("threads").get(timeout=30)

        def done() -> bool:
            counts = [
                [self.ledger.count(phase, task_id=each) for each in task_ids]
                for phase in ("received", "done")
            ]
            return counts[0] == counts[1]

        wait_for(done, 30, "the end of all messages")

    def conflicts(self, task_id: str | None = None) -> int:
        return self.ledger.count("conflicted", task_id=task_id)


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
            settings = {"worker_enable_remote_control": False, **settings}
            site = sites.open_site(Site, request, broker, ledger, start_worker, settings)
            stack.callback(site.close)
            if settings.get("broker_transport_options") == IMPATIENT:
                stack.enter_context(sites.restoring(site))
            return site

        yield open_site


@pytest.fixture(scope="session", params=[REDIS, RABBITMQ_TOO])
def shared(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site with one healthy worker of four processes, which no test breaks; keys are each test's own."""
    with sites.share(
        Site, request, tmp_path_factory, request.param, worker_enable_remote_control=False
    ) as site:
        site.worker(concurrency=4)
        yield site
