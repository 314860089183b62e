"""``celery -A … idempotency …`` in processes of its own, over what a real worker left in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from celery_idempotent import get_store
from celery_idempotent.records import Identity
from tests.cli.running import Ran, run_idempotency
from tests.delivery import app as app_module
from tests.support import sites
from tests.support.waiting import wait_for


class Site(sites.Site):
    """A worker's queue, and the command line of its app."""

    module: ClassVar[Any] = app_module

    def run(self, *words: str) -> Ran:
        return run_idempotency(app_module.__name__, app_module.environment(self.settings), *words)


@pytest.fixture
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """A site whose leases last five seconds."""
    how = {"worker_enable_remote_control": False, "idempotency_lease": 5}
    with sites.share(Site, request, tmp_path_factory, "redis", **how) as site:
        yield site


def test_what_a_killed_worker_did_is_completed_and_its_redelivery_gets_the_value(site, tmp_path):
    """Its message comes back, and so does a duplicate: neither does it again."""
    site.worker(concurrency=1)
    never = tmp_path / "never"
    message = site.message("keyed", "charged", 0.0, str(never), task_id="t-charged")
    site.deliver(message)
    wait_for(lambda: site.ledger.count("start", "charged") == 1, 30, "a run")
    assert "charged of keyed is PROCESSING: task t-charged (" in site.run("explain", "charged").text
    for worker in sites.SHARED_WORKERS:
        worker.kill()
    store, identity = get_store(site.app), Identity(namespace="keyed", key="charged")
    wait_for(lambda: store.get(identity).stale(store.now_ms()), 30, "the end of a lease")

    words = ("--task", "keyed", "--who", "alice", "--reason", "the bank has it", "--yes")
    done = site.run("complete", "charged", "--value", '{"charge": "ch_17"}', *words)
    assert done.code == 0, done.text
    assert "alice completed keyed key charged: the bank has it" in done.text

    redelivered, settled = site.deliver(message), store.get(identity)
    site.worker(concurrency=1)
    duplicate = site.publish("keyed", "charged", 0.0, str(never))
    assert duplicate.get(timeout=30) == {"charge": "ch_17"}
    assert redelivered.get(timeout=30) == {"charge": "ch_17"}
    assert site.ledger.count("start", "charged") == 1
    assert store.get(identity) == settled
    assert (
        "is COMPLETED: an operator completed it with a value" in site.run("explain", "charged").text
    )
