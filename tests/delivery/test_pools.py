"""Pools of threads, greenlets, coroutines, and of processes that fork late."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from functools import partial

import celery
import pytest

from celery_idempotent import State
from tests.delivery.conftest import Site
from tests.support import sites
from tests.support.servers import need
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.redis]

#: How many greenlets or threads a worker has: more than a worker usually has processes.
MANY = 40
#: Eventlet is patched by the same code of ours, in the same places.
KINDS = ["gevent", "threads", pytest.param("eventlet", marks=pytest.mark.wide)]


class Green(Site):
    """A site whose one worker runs many tasks in its process."""

    pool: str
    only: Worker


@pytest.fixture(scope="module", params=KINDS)
def green(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Green]:
    if request.param != "threads":
        need(importlib.util.find_spec(request.param), request.param)
    # With kombu's own 10 connections a greenlet may find none to acknowledge by, which ends the consumer.
    settings = {
        "idempotency_lease": 1,
        "broker_transport_options": {"max_connections": 2 * MANY},
        "worker_prefetch_multiplier": 4,
    }
    with sites.share(Green, request, tmp_path_factory, "redis", **settings) as site:
        site.pool = request.param
        site.only = site.worker(pool=request.param, concurrency=MANY)
        yield site


def started(site: Site, *keys: str) -> None:
    for key in keys:
        wait_for(partial(site.ledger.count, "start", key), 40, f"the run of {key}")


def ran(site: Site, key: str) -> tuple[int, int]:
    return site.ledger.count("start", key), site.ledger.count("end", key)


class TestInOneProcess:
    def test_a_claim_is_renewed_while_a_body_outlives_its_lease(self, green, key, gate):
        result = green.publish("keyed", key, 0.0, gate.path)
        started(green, key)
        first = green.record("keyed", key)

        def renewed() -> bool:
            record = green.record("keyed", key)
            assert (record.state, record.token) == (State.PROCESSING, first.token)
            return bool(record.deadline_ms > first.deadline_ms + 2000)

        wait_for(renewed, 20, "the lease to be renewed, for more than two leases")
        again = green.publish("keyed", key, 0.0, gate.path)
        wait_for(lambda: green.conflicts(again.id), 20, "the conflict")
        gate.open()
        assert again.get(timeout=40) == result.get(timeout=40)
        assert ran(green, key) == (1, 1)
        assert green.record("keyed", key).crashes == 0

    def test_each_of_many_sees_its_own_claim(self, green, key, gate):
        keys = [f"{key}-{number}" for number in range(MANY - 5)]
        sent = [green.publish("looking", each, gate.path) for each in keys]
        started(green, *keys)  # all at once
        gate.open()
        for each, result in zip(keys, sent, strict=True):
            assert result.get(timeout=40) == [[each, True, True]]
            assert ran(green, each) == (1, 1)

    def test_one_that_is_killed_gives_its_key_back(self, green, key, gate):
        if green.pool == "threads":
            pytest.skip("no thread can be ended")
        if green.pool == "gevent" and celery.VERSION[:2] < (5, 5):
            pytest.skip("Celery's gevent pool kills nothing before 5.5")
        bystander = green.publish("keyed", f"{key}-bystander", 0.0, gate.path)
        victim = green.publish("keyed", key, 0.0, gate.path)
        started(green, key, f"{key}-bystander")
        green.app.control.revoke(victim.id, terminate=True)
        wait_for(lambda: green.ledger.count("released", key), 40, "the release")
        assert green.record("keyed", key) is None
        wait_for(lambda: victim.state == "REVOKED", 40, lambda: victim.state)
        gate.open()
        assert green.publish("keyed", key, 0.0, gate.path).get(timeout=40)
        assert bystander.get(timeout=40)
        assert (ran(green, key), ran(green, f"{key}-bystander")) == ((2, 1), (1, 1))

    def test_a_hard_limit_is_a_crash_whose_key_waits_for_the_lease(self, green, key, gate):
        if green.pool != "gevent":
            pytest.skip("Celery's other pools know no time limits")
        late = green.publish("keyed", key, 0.0, gate.path, time_limit=1)
        with pytest.raises(Exception, match="TimeLimitExceeded"):
            late.get(timeout=40)
        assert green.record("keyed", key).state is State.PROCESSING
        gate.open()
        assert green.publish("keyed", key, 0.0, gate.path).get(timeout=40)
        assert green.record("keyed", key).crashes == 1
        assert green.ledger.count("released", key) == 0
        assert ran(green, key) == (2, 1)
        assert "could not look after" not in green.only.log
        assert "Traceback" not in green.only.log.partition("Hard time limit")[2]


def test_a_coroutine_is_completed_when_it_is_done_and_runs_again_if_it_is_not(open_site, key, gate):
    """In the pool of celery-aio-pool, by a base that runs coroutines on the pool's own loop."""
    site = open_site("redis", idempotency_lease=2, broker_transport_options=sites.IMPATIENT)
    worker = site.worker(
        pool="custom", env={"CELERY_CUSTOM_WORKER_POOL": "celery_aio_pool.pool:AsyncIOPool"}
    )
    site.publish("awaited", key, gate.path, ignore_result=True)
    started(site, key)
    assert site.record("awaited", key).state is State.PROCESSING
    worker.kill()
    gate.open()
    worker.start()
    answer = site.publish("awaited", key, gate.path).get(timeout=40)
    assert ran(site, key) == (2, 1)
    assert site.record("awaited", key).state is State.COMPLETED
    assert site.publish("awaited", key, gate.path).get(timeout=40) == answer
    assert ran(site, key) == (2, 1)


def test_a_task_longer_than_its_lease_keeps_its_claim_in_children_that_fork_late(open_site, key):
    """Each child runs one task, forked from a main process that has a claim, a heartbeat and a connection."""
    site = open_site("redis", idempotency_lease=1)
    elsewhere = site.new_queue()
    site.worker(ready=False, concurrency=2, queues=[elsewhere], name="elsewhere")
    worker = site.worker(
        concurrency=2, wanted={"claim_before_fork": True}, arguments=["--max-tasks-per-child=1"]
    )
    assert site.record("keyed", "before the fork").state is State.COMPLETED
    children = worker.children()

    first = site.publish("keyed", key, 5.0)
    wait_for(lambda: site.ledger.entries("start", key), what="the run")
    duplicates = [site.publish("keyed", key, 5.0, queue=elsewhere) for _ in range(3)]
    # No thread before the first claim; and the child that is forked next has one for its own.
    idle = site.publish("threads").get(timeout=20)
    assert idle["pid"] in children
    assert idle["threads"] == 1
    later = site.publish("keyed", f"{key}.later", 1.5)

    answer = first.get(timeout=30)
    assert answer["pid"] in children
    assert answer["threads"] == 2
    assert later.get(timeout=30)["pid"] not in [worker.pid, *children]
    assert [each.get(timeout=20) for each in duplicates] == [answer] * 3
    for run in (key, f"{key}.later"):
        assert site.ledger.count("start", run) == site.ledger.count("end", run) == 1
        record = site.record("keyed", run)
        assert (record.state, record.crashes, record.attempts) == (State.COMPLETED, 0, 1)
    # The duplicates kept coming all the time, and went away again.
    for each in duplicates:
        assert 3 <= site.conflicts(each.id) <= 20
    assert site.ledger.count("lease_lost") == 0
