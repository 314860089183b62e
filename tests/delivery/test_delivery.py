"""Messages that arrive more than once, in whatever way brokers and clients find to do that, run once."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any

import pytest

from celery_idempotent import State
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.delivery.conftest import Site

pytestmark = [pytest.mark.worker, pytest.mark.redis]


def results(site: Site, *task_ids: str) -> list[Any]:
    return [site.result(task_id).get(timeout=20) for task_id in task_ids]


def wait_for_phase(site: Site, count: int, phase: str, **which: str) -> None:
    wait_for(
        lambda: site.ledger.count(phase, **which) >= count,
        20,
        lambda: f"{count} × {phase} of {which}; ledger: {site.ledger.entries(**which)}",
    )


class TestOneKey:
    def test_published_five_times_at_once_runs_once_and_everyone_gets_the_first_answer(
        self, shared, key, gate
    ):
        published = [shared.publish("keyed", key, 0.0, gate.path) for _ in range(5)]
        wait_for_phase(shared, 4, "conflicted", key=key)
        gate.open()
        answers = results(shared, *(each.id for each in published))
        assert shared.ledger.count("start", key) == shared.ledger.count("end", key) == 1
        assert len({each.id for each in published}) == 5
        assert answers == [answers[0]] * 5
        record = shared.record("keyed", key)
        assert record is not None
        assert record.state is State.COMPLETED
        assert record.task_id == shared.ledger.entries("start", key)[0].task_id


class TestAMessageOfAnOldPublisher:
    """Its app does not import the library: no header, so the worker finds the key."""

    @pytest.mark.parametrize("protocol", [1, 2])
    def test_may_be_written_by_hand_in_any_protocol(self, shared, key, protocol):
        task_id = str(uuid.uuid4())
        if protocol == 1:
            headers: dict[str, Any] = {}
            body: Any = {"task": "keyed", "id": task_id, "args": [key], "kwargs": {}}
        else:
            headers = {"task": "keyed", "id": task_id}
            body = [[key], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
        queue = shared.app.amqp.queues[shared.queue]
        for _ in range(2):
            with shared.app.producer_pool.acquire(block=True) as producer:
                producer.publish(
                    body,
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    declare=[queue],
                    serializer="json",
                    correlation_id=task_id,
                    headers=headers,
                )
        by_hand = shared.result(task_id).get(timeout=20)
        assert shared.publish("keyed", key).get(timeout=20) == by_hand
        wait_for_phase(shared, 2, "replayed", key=key)
        assert shared.ledger.count("start", key) == 1


def test_fifty_retries_without_a_countdown_never_meet_their_predecessor(shared, key):
    """A retry is the same operation: it keeps its key."""
    # Two at a time for four processes: an idle one has the retry before its predecessor is done.
    keys = [f"{key}.{n}" for n in range(2)]
    published = [shared.publish("retrying", each, 25, 0, 50) for each in keys]
    wait_for(
        lambda: all(shared.ledger.count("end", each) for each in keys),
        40,
        lambda: f"two ends; there are {[shared.ledger.count('start', each) for each in keys]} runs",
    )
    assert [shared.ledger.count("start", each) for each in keys] == [26, 26]
    assert [shared.conflicts(each.id) for each in published] == [0, 0]
    assert not any(shared.ledger.count("replayed", each) for each in keys)


def test_a_lost_child_costs_its_key_a_moment_and_not_a_lease(broker, open_site, key, gate):
    # Neither acks_late nor reject_on_worker_lost is set: the defaults.
    site = open_site(broker, idempotency_lease=300)
    worker = site.worker(concurrency=2)
    result = site.publish("keyed", key, 0.0, gate.path)
    lost = wait_for(lambda: site.ledger.entries("start", key), 20, "the first run")[0]
    worker.kill_child(lost.pid)
    gate.open()
    assert result.get(timeout=60)["pid"] != lost.pid
    assert (site.ledger.count("start", key), site.ledger.count("end", key)) == (2, 1)
    assert site.ledger.count("interrupted", key) == 1
    record = site.record("keyed", key)
    assert (record.state, record.crashes, record.attempts) == (State.COMPLETED, 1, 2)
