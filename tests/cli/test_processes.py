"""``celery -A … idempotency …`` in processes of its own, over what a real worker left in Redis."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from celery_idempotent import get_store
from celery_idempotent.records import Identity, State
from tests.cli.running import Ran, run_idempotency
from tests.delivery import app as app_module
from tests.support import sites
from tests.support.waiting import wait_for


class Site(sites.Site):
    """A worker's queue, and the command line of its app."""

    module: ClassVar[Any] = app_module

    def run(self, *words: str) -> Ran:
        return run_idempotency(app_module.__name__, app_module.environment(self.settings), *words)

    def state(self, task: str, key: str) -> State | None:
        record = get_store(self.app).get(Identity(namespace=task, key=key))
        return None if record is None else record.state


@pytest.fixture(scope="module")
def histories(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Site, Path]]:
    """What may become of a key, made by one worker: done, refused, too many crashes, at work, mismatched."""
    gate = tmp_path_factory.mktemp("gate") / "gate"
    with sites.share(
        Site,
        request,
        tmp_path_factory,
        "redis",
        worker_enable_remote_control=False,
        idempotency_lease=5,
    ) as site:
        site.worker(concurrency=3)
        done = site.publish("keyed", "done", task_id="t-done")
        site.publish("refused", "declined", task_id="t-declined")
        site.publish("killing", "deadly", task_id="t-deadly")
        site.publish("keyed", "busy", 0.0, str(gate), task_id="t-busy")
        done.get(timeout=30)
        wait_for(lambda: site.state("refused", "declined") is State.FAILED, 30, "a refusal")
        wait_for(lambda: site.state("killing", "deadly") is State.FAILED, 60, "too many crashes")
        wait_for(lambda: site.state("keyed", "busy") is State.PROCESSING, 30, "a run")
        yield site, gate
        gate.touch()


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ("busy", ["busy of keyed is PROCESSING: task t-busy ("]),
        ("declined", ["declined of refused is FAILED permanently with Refused"]),
        (
            "t-deadly",
            ["deadly of killing", "TooManyCrashes", "Claims so far: 5; leases without a result: 4"],
        ),
    ],
)
def test_explain_tells_what_happened_by_key_or_by_task_id(histories, asked, told):
    site, _ = histories
    done = site.run("explain", asked)
    assert done.code == 0, done.text
    for each in told:
        assert each in done.text


def test_what_a_killed_worker_did_is_completed_and_its_redelivery_gets_the_value(histories):
    """Its message comes back, and so does a duplicate: neither does it again."""
    site, gate = histories
    site.worker(concurrency=1)
    never = gate.with_name("never at all")
    message = site.message("keyed", "charged", 0.0, str(never), task_id="t-charged")
    site.deliver(message)
    wait_for(lambda: site.ledger.count("start", "charged") == 1, 30, "a run")
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
