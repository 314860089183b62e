"""The pools of greenlets, gevent and eventlet: as any other pool, while a body lets others have their turn."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

import celery
import pytest

from celery_idempotent import State
from tests.pools.conftest import Site
from tests.support.servers import need
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

#: How many greenlets a worker has: more than a worker usually has processes.
MANY = 40


@pytest.fixture(scope="module", params=["gevent", pytest.param("eventlet", marks=pytest.mark.wide)])
def pool(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    need(importlib.util.find_spec(name), name)
    return name


@pytest.fixture(scope="module")
def site(pool: str, open_site: Callable[..., Site]) -> Site:
    """A site with one worker of many greenlets, for all tests of this module; keys are each test's own."""
    # With kombu's own 10 connections a greenlet may find none to acknowledge by, which ends the consumer.
    site = open_site(idempotency_lease=1, broker_transport_options={"max_connections": 2 * MANY})
    site.worker(pool, concurrency=MANY)
    return site


def test_a_claim_is_renewed_while_a_body_outlives_its_lease(site: Site, key: str, gate: str):
    result = site.send("work", key, gate)
    site.noted("start", key)
    first = site.record(key)

    def renewed() -> bool:
        record = site.record(key)
        assert (record.state, record.token) == (State.PROCESSING, first.token)
        return bool(record.deadline_ms > first.deadline_ms + 2000)

    wait_for(renewed, 20, "the lease to be renewed, for more than two leases")
    again = site.send("work", key, gate)
    site.noted("signal conflicted", key)
    site.open(gate)
    assert site.value(again) == site.value(result)
    assert (site.count("start", key), site.count("effect", key)) == (1, 1)
    assert site.record(key).crashes == 0


def test_each_of_many_greenlets_sees_its_own_claim(site: Site, key: str, gate: str):
    keys = [f"{key}-{number}" for number in range(MANY - 5)]
    sent = [site.send("looking", each, gate) for each in keys]
    for each in keys:
        site.noted("start", each)  # all at once
    site.open(gate)
    for each, result in zip(keys, sent, strict=True):
        assert len(site.value(result)) == 1, each
        assert each in site.value(result)[0]
        assert site.value(result)[0].endswith(", True, True)")
        assert site.count("effect", each) == 1


class TestEnds:
    def test_a_killed_greenlet_gives_its_key_back(self, site: Site, pool: str, key: str, gate: str):
        if pool == "gevent" and celery.VERSION[:2] < (5, 5):
            pytest.skip("Celery's gevent pool kills nothing before 5.5")
        bystander = site.send("work", f"{key}-bystander", gate)
        victim = site.send("work", key, gate)
        site.noted("start", f"{key}-bystander")
        site.noted("start", key)
        site.app.control.revoke(victim.id, terminate=True)
        site.noted("signal released", key)
        assert site.record(key) is None
        site.end(victim, "REVOKED")
        site.open(gate)
        again = site.send("work", key)
        assert site.value(again) is not None
        assert (site.count("start", key), site.count("effect", key)) == (2, 1)
        site.value(bystander)
        assert site.count("effect", f"{key}-bystander") == 1

    def test_a_hard_limit_is_a_crash_whose_key_waits_for_the_lease(
        self, site: Site, pool: str, key: str, gate: str
    ):
        if pool == "eventlet":
            pytest.skip("Celery's eventlet pool knows no time limits")
        late = site.send("work", key, gate, time_limit=1)
        assert type(site.end(late, "FAILURE")).__name__ == "TimeLimitExceeded"
        assert site.record(key).state is State.PROCESSING
        site.value(site.send("work", key))
        assert site.record(key).crashes == 1
        assert site.count("signal released", key) == 0
        assert (site.count("start", key), site.count("effect", key)) == (2, 1)
        assert "could not look after" not in site.workers[0].log
        assert "Traceback" not in site.workers[0].log.partition("Hard time limit")[2]
