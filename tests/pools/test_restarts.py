"""Pools that change while a worker runs: restarts, children that are replaced, more and fewer of them."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from celery_idempotent import State
from tests.pools.app import BEFORE_VARIABLE
from tests.pools.conftest import PATIENCE, Site
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

#: A key that the main process claimed, ran, failed to run, read and published with before its pool started.
BEFORE = f"before.{uuid.uuid4().hex}"


def ran_once(site: Site, *keys: str) -> None:
    """Each took effect once, nothing was lost meanwhile, and a duplicate is told what came of it."""
    for key in keys:
        site.completed(key)
        record = site.record(key)
        assert (record.state, record.crashes) == (State.COMPLETED, 0)
        assert site.count("effect", key) == 1, site.ledger.entries(key=key)


@pytest.fixture(scope="module")
def site(open_site: Callable[..., Site]) -> Site:
    """A worker whose children live for three tasks, and whose main process did everything before it forked."""
    site = open_site(worker_pool_restarts=True, idempotency_lease=2)
    site.worker(
        "prefork",
        concurrency=2,
        arguments=["--max-tasks-per-child=3"],
        env={BEFORE_VARIABLE: BEFORE},
    )
    return site


def test_children_take_over_what_the_main_process_did_before_it_forked(site: Site):
    (worker,) = site.workers
    (effect,) = site.ledger.entries("effect", BEFORE)
    assert effect.pid == worker.pid
    again = site.value(site.send("work", BEFORE))
    assert again["pid"] == worker.pid
    ran_once(site, BEFORE, f"{BEFORE}-published")
    (effect,) = site.ledger.entries("effect", f"{BEFORE}-published")
    assert effect.pid != worker.pid


def test_children_that_are_replaced_after_some_tasks_leave_nothing_undone(site: Site, key: str):
    keys = [f"{key}-{number}" for number in range(8)]
    sent = [site.send("work", each) for each in (*keys, *keys)]
    answers = [site.value(each)["run"] for each in sent]
    assert answers[:8] == answers[8:]
    ran_once(site, *keys)
    assert len({e.pid for each in keys for e in site.ledger.entries("effect", each)}) >= 3


def test_a_pool_restart_lets_runs_end_and_the_next_children_go_on(site: Site, key: str, gate: str):
    held = site.send("work", key, gate)
    site.noted("start", key)
    (run,) = site.ledger.entries("start", key)
    before = site.record(key)
    others = set(site.workers[0].children()) - {run.pid}
    (reply,) = site.app.control.pool_restart(reply=True, timeout=PATIENCE, limit=1) or [{}]
    assert "ok" in next(iter(reply.values())), reply
    wait_for(lambda: not others & set(site.workers[0].children()), PATIENCE, "the idle child's end")
    # The pool has one that is new, and the one that is at it, whose lease goes on.
    later = site.value(site.send("work", f"{key}-later"))
    assert later["pid"] not in others | {run.pid}
    wait_for(
        lambda: site.record(key).deadline_ms > before.deadline_ms + 2000,
        PATIENCE,
        "its claim to be renewed, for longer than a lease",
    )
    assert site.record(key).token == before.token
    site.open(gate)
    assert site.value(held)["pid"] == run.pid
    wait_for(lambda: run.pid not in site.workers[0].children(), PATIENCE, "its own end")
    assert site.value(site.send("work", key)) == held.result
    ran_once(site, key, f"{key}-later")


def test_a_pool_that_grows_and_shrinks_leaves_nothing_undone(
    open_site: Callable[..., Site], key: str, gate: str
):
    site = open_site(idempotency_lease=2)
    worker = site.worker(
        "prefork",
        arguments=["--autoscale=5,1"],
        env={"AUTOSCALE_KEEPALIVE": "0.5"},
        fresh=True,  # it is read when Celery is imported
    )
    keys = [f"{key}-{number}" for number in range(5)]
    sent = [site.send("work", each, gate) for each in keys]
    for each in keys:
        site.noted("start", each)
    assert len({e.pid for each in keys for e in site.ledger.entries("start", each)}) == 5
    site.open(gate)
    for result in sent:
        site.value(result)
    # It shrinks to one, and grows again; then it is given work while more of its children are about to end.
    for wanted in (1, 4):
        wait_for(
            lambda wanted=wanted: len(worker.children()) <= wanted,  # type: ignore[misc]
            PATIENCE,
            f"the pool to shrink to {wanted}",
        )
        burst = [f"{key}-{uuid.uuid4().hex}" for _ in range(8)]
        for result in [site.send("work", each) for each in burst + burst]:
            site.value(result)
        keys += burst
    ran_once(site, *keys)
