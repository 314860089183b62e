"""Leases: what is alive keeps its claim however long it takes, and what was frozen past its lease is refused."""

from __future__ import annotations

from typing import Any

import pytest

from celery_idempotent import State
from tests.support.sites import IMPATIENT
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]

LEASE = 2


def test_a_run_frozen_past_its_lease_answers_as_the_redelivery_of_its_own_message(
    broker, open_site, key, gate
):
    """It wakes up, finishes, and learns that it is late: nothing of it is kept.

    Redis gives the message back after the visibility timeout, RabbitMQ when it misses the worker's heartbeat.
    """
    frozen: dict[str, Any] = {"broker_heartbeat": 2}
    if broker == "redis":
        frozen = {"broker_transport_options": IMPATIENT}
    site = open_site(broker, idempotency_lease=LEASE, **frozen)
    workers = site.workers(2, concurrency=1)
    message = site.message("keyed", key, 0.0, gate.path)
    result = site.deliver(message)
    begun = wait_for(lambda: site.ledger.entries("start", key), 20, "a run")[0]
    loser = next(each for each in workers if begun.pid in each.children())
    states = site.states(message.task_id)
    loser.freeze()
    (winner,) = wait_for(lambda: site.ledger.entries("start", key)[1:], 30, "the other worker")
    assert winner.pid != begun.pid
    assert winner.time - begun.time > LEASE - 0.5  # the claim came a little before the run
    assert winner.task_id == begun.task_id
    gate.open()
    answer = result.get(timeout=20)
    assert answer["pid"] == winner.pid
    settled = site.record("keyed", key)
    assert (settled.state, settled.crashes, settled.attempts) == (State.COMPLETED, 1, 2)

    loser.thaw()
    said = f"Task keyed[{begun.task_id}] succeeded"
    wait_for(lambda: said in loser.log, 20, "the frozen run to come to its end")
    assert answer["run"] in loser.log.partition(said)[2].splitlines()[0]
    assert [each.pid for each in site.ledger.entries("lease_lost", key)] == [begun.pid]
    assert site.ledger.count("start", key) == site.ledger.count("end", key) == 2
    assert site.record("keyed", key) == settled
    stored = states.stored()
    assert {each["status"] for each in stored} <= {"STARTED", "SUCCESS"}
    assert all(each["result"] == answer for each in stored if each["status"] == "SUCCESS")
    assert result.get(timeout=30) == answer


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
