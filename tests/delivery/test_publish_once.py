"""``idempotency_publish_once``: the first publish wins, and nothing that goes wrong keeps the next one from it."""

from __future__ import annotations

import os
import pickle
import signal
import time
from typing import Any

import pytest
import redis
from celery import chain, chord, group

from celery_idempotent import DuplicateCall
from celery_idempotent.celery import publishing
from celery_idempotent.celery.sweep import sweep
from celery_idempotent.records import State
from tests.support.sites import IMPATIENT, RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture(params=[REDIS, RABBITMQ_TOO])
def unattended(request, open_site):
    """A site whose queue nobody reads."""
    site = open_site(request.param)
    with site.app.connection_for_write() as connection:
        site.app.amqp.queues[site.queue].bind(connection.default_channel).declare()
    return site


@pytest.fixture
def short(monkeypatch):
    """Reservations that count as lost after a second."""
    monkeypatch.setattr(publishing, "RESERVED_MS", 1000)
    return 1.0


@pytest.mark.parametrize("name", ["once", "once_unretained"])
def test_copies_of_a_message_that_waits_in_a_long_queue_run_once(unattended, key, short, name):
    """Each deadline is twice as long as the last one."""
    first, calls = unattended.publish(name, key), 0
    until = time.monotonic() + 8 * short
    while time.monotonic() < until:
        assert unattended.publish(name, key).id == first.id
        calls += 1
        time.sleep(0.1)
    assert calls > 20
    assert 2 <= unattended.length() <= 5  # at 0, 1, 2, 4 and 8 seconds after the one before
    unattended.worker(concurrency=1)
    unattended.idle(first.id)
    assert unattended.ledger.count("start", key) == 1
    # Nor does a copy that comes after the next call.
    if name == "once_unretained":
        second = unattended.publish(name, key)
        assert second.id != first.id
        second.get(timeout=30)
        unattended.publish(name, key, task_id=first.id)
        unattended.idle(first.id)
        assert unattended.ledger.count("start", key) == 2


def test_a_result_says_which_call_had_the_key_before(unattended, key):
    first, second = unattended.publish("once", key), unattended.publish("once", key)
    assert (first.duplicate, first.earlier) == (False, None)
    assert second.duplicate
    assert (second.earlier.task_id, second.earlier.state) == (first.id, State.QUEUED)
    read = pickle.loads(pickle.dumps(second))
    assert (read.id, read.duplicate, read.earlier) == (first.id, True, second.earlier)
    assert unattended.publish("keyed", key).duplicate is None
    assert unattended.app.tasks["keyed"].s(key).apply_async().duplicate is None
    assert unattended.app.tasks["once"].s(key).apply_async().id == first.id
    sent = unattended.publish("once_or_raise", key)
    with pytest.raises(DuplicateCall, match="is QUEUED") as raised:
        unattended.publish("once_or_raise", key)
    assert (raised.value.task_id, raised.value.state) == (sent.id, "QUEUED")
    assert not sent.duplicate
    unattended.worker(concurrency=1)
    first.get(timeout=30)
    done = unattended.publish("once", key)
    assert (done.duplicate, done.earlier.state) == (True, State.COMPLETED)
    assert abs(done.earlier.since.timestamp() - time.time()) < 60


def test_until_start_one_call_waits_beside_the_one_that_runs(open_site, broker, key, gate):
    site = open_site(broker)
    site.worker(concurrency=2)
    first = site.publish("until_start", key, 0.0, gate.path)
    wait_for(lambda: site.ledger.count("start", key), what="the run")
    waiting = [site.publish("until_start", key) for _ in range(5)]
    assert [each.duplicate for each in waiting] == [False, True, True, True, True]
    (second,) = {each.id for each in waiting}
    assert second != first.id
    gate.open()
    assert waiting[0].get(timeout=30) != first.get(timeout=30)
    assert not site.publish("until_start", key).duplicate
    site.idle(first.id, second)
    wait_for(lambda: site.ledger.count("end", key) == 3, what="the third run")
    starts, ends = site.ledger.entries("start", key), site.ledger.entries("end", key)
    assert all(end.time <= start.time for end, start in zip(ends, starts[1:], strict=False))


@pytest.mark.parametrize("retries", [0, 1])
def test_the_call_that_waits_takes_the_arguments_of_the_newest(
    open_site, broker, key, gate, retries
):
    site = open_site(broker)
    site.worker(concurrency=2)
    first = site.publish("newest", key, 0, gate.path)
    wait_for(lambda: site.ledger.count("start", key), what="the run")
    waiting = [site.publish("newest", key, number, "", retries) for number in (1, 2, 3)]
    assert [each.duplicate for each in waiting] == [False, True, True]
    gate.open()
    assert (first.get(timeout=30), {each.get(timeout=30) for each in waiting}) == (0, {3})
    assert [site.ledger.count(f"number {n}", key) for n in range(4)] == [1, 0, 0, 1 + retries]


def test_the_newest_arguments_outlast_a_crash_of_the_run(open_site, key, gate):
    site = open_site("redis", broker_transport_options=IMPATIENT, idempotency_lease=2)
    worker = site.worker(concurrency=1)
    first = site.publish("newest", key, 0, countdown=1)
    assert site.publish("newest", key, 1, gate.path).id == first.id
    wait_for(lambda: site.ledger.count("start", key), what="the run")
    os.kill(worker.children()[0], signal.SIGKILL)
    gate.open()
    assert first.get(timeout=60) == 1
    assert site.ledger.count("number 0", key) == 0


def test_a_task_that_calls_itself_until_start_has_one_successor(shared, key):
    assert shared.publish("again", key, 3).get(timeout=30) == [False, True, True]
    assert shared.publish("once", f"{key} once").duplicate is False


def test_a_message_that_the_broker_lost_is_sent_again_where_the_record_keeps_it(
    open_site, key, short
):
    site = open_site("redis", idempotency_sweep_interval=None)
    first = site.publish("once_kept", key)
    assert site.record("once_kept", key).message is not None
    with redis.Redis.from_url(site.settings["broker_url"]) as client:
        assert client.delete(site.queue) == 1
    wait_for(lambda: sweep(site.app) and site.length(), 20, "the sweep to send it", interval=0.2)
    site.worker(concurrency=1)
    assert first.get(timeout=30)
    assert site.ledger.count("start", key) == 1
    assert site.record("once_kept", key).message is None


@pytest.mark.parametrize("why", ["revoked", "expired"])
def test_a_task_that_a_worker_discards_keeps_its_key_until_it_is_forgotten(
    open_site, key, gate, why
):
    """The worker discards every message of its task id: after a forget the next publish has another."""
    site = open_site("redis", worker_enable_remote_control=True)
    site.worker(concurrency=1)
    site.publish("keyed", f"{key}.busy", 0.0, gate.path)
    wait_for(lambda: site.ledger.count("start", f"{key}.busy"), what="a busy worker")
    first = site.publish("once", key, expires=0.3 if why == "expired" else None)
    if why == "revoked":
        first.revoke()
    time.sleep(0.5)
    gate.open()
    wait_for(lambda: site.ledger.count("done", task_id=first.id), what="its end")
    assert site.publish("once", key).id == first.id
    assert site.app.tasks["once"].idempotency_forget(key)
    assert site.publish("once", key).get(timeout=30)
    assert site.ledger.count("start", key) == 1


def test_a_publish_between_a_run_and_its_retry_is_the_first_task(shared, key):
    first = shared.publish("once_retrying", key, 1, 0.1, 1)
    seen = set()
    # Not until the result is there: a busy worker may store that it retries after the retry has stored its result.
    while not shared.ledger.count("end", key):
        seen.add(shared.publish("once_retrying", key, 1, 0.1, 1).id)
    assert seen == {first.id}
    shared.idle(first.id)
    assert shared.ledger.count("start", key) == 2
    assert shared.ledger.count("received", task_id=first.id) == 2


def test_everything_in_a_canvas_is_published(shared, key):
    once, echo = shared.app.tasks["once"], shared.app.tasks["echo"]
    grouped: Any = group([once.s(key), once.s(key)], app=shared.app).apply_async()
    values = grouped.get(timeout=30)
    assert values[0] == values[1]
    chorded: Any = chord([once.s(key), once.s(key)], echo.s(), app=shared.app).apply_async()
    assert chorded.get(timeout=30) == values
    chained: Any = chain(once.si(key), echo.s(), once.si(key), echo.s()).apply_async()
    assert chained.get(timeout=30) == values[0]
    # A member that meets the other goes round, under its own id.
    ids = [each.id for each in (*grouped.results, *chorded.parent.results)]
    ids += [chained.parent.id, chained.parent.parent.parent.id]
    assert len(set(ids)) == 6
    shared.idle(*ids)
    assert all(shared.ledger.count("received", task_id=each) for each in ids)
    assert shared.ledger.count("start", key) == 1
