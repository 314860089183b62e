"""``idempotency_on_stale``: what a sweep does about a run whose worker never came back."""

from __future__ import annotations

import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
from celery import chain

from celery_idempotent import get_store
from celery_idempotent.celery.sweep import SWEEP, sweep
from celery_idempotent.records import State
from tests.delivery.app import Refused
from tests.support.sites import RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


ON_BOTH = pytest.mark.parametrize("broker", [REDIS, RABBITMQ_TOO], indirect=True)


@ON_BOTH
def test_many_sweeps_send_a_lost_message_once_with_all_its_options(broker, open_site, key, gate):
    """Though it expired meanwhile: it began in time, and a copy that a worker discards would be sent for ever."""
    site = open_site(broker, idempotency_lease=1)
    worker = site.worker(concurrency=2)
    options: dict[str, Any] = {"priority": 3, "soft_time_limit": 50, "headers": {"mine": "x"}}
    expired = time.time() + 4
    message = site.message("requeued", key, 0.0, gate.path, expires=4, **options)
    first = site.deliver(message)
    wait_for(lambda: site.ledger.count("start", key), 30, "the run")
    worker.kill()
    stale = site.record("requeued", key)
    assert stale.state is State.PROCESSING
    wait_for(lambda: stale.stale(get_store(site.app).now_ms()), what="the end of the lease")
    assert site.length() == 0
    wait_for(lambda: time.time() > expired, what="the time at which it expires")
    with ThreadPoolExecutor(8) as pool:
        counts = list(pool.map(lambda _: sweep(site.app), range(16)))
    assert sum(each["requeued"] for each in counts) == 1
    wait_for(lambda: site.length() == 1, what="one message")
    record = site.record("requeued", key)
    assert (record.state, record.crashes, record.task_id) == (State.QUEUED, 1, first.id)
    (sent,) = site.take(site.queue, 1)
    for name in ("id", "task", "timelimit", "mine", "idempotency", "retries", "root_id"):
        assert sent.headers[name] == message.headers[name]
    site.deliver(sent)
    gate.open()
    worker.start()
    assert first.get(timeout=30)
    assert sweep(site.app)["requeued"] == 0
    assert site.ledger.count("received", task_id=first.id) == 2
    assert (site.ledger.count("start", key), site.ledger.count("end", key)) == (2, 1)


@ON_BOTH
def test_a_failed_task_that_keeps_its_message_runs_again(broker, open_site, key):
    """Its result goes from FAILURE to SUCCESS, and the rest of its chain runs."""
    site = open_site(broker)
    site.worker(concurrency=1)
    task = site.app.tasks["refused_once"]
    last = chain(task.s(key), site.app.tasks["appending"].s())()
    first = last.parent
    with pytest.raises(Refused):
        first.get(timeout=30)
    assert site.record("refused_once", key).message is not None
    assert task.idempotency_requeue(key, who="alice")
    for each in first, last:  # Celery failed the rest of the chain, too
        end = partial(site.app.AsyncResult, each.id)
        wait_for(lambda end=end: end().state == "SUCCESS", 30, "the second run", interval=0.1)
    record = site.record("refused_once", key)
    assert (record.state, record.message, record.attempts) == (State.COMPLETED, None, 2)
    assert not task.idempotency_requeue(key), "what took effect"


@ON_BOTH
def test_the_sweep_registers_itself_with_beat_and_interrupts_what_nobody_will_redeliver(
    broker, open_site, tmp_path, key, gate
):
    settings = {"idempotency_sweep_interval": 0.5, "task_acks_late": False}
    site = open_site(broker, idempotency_lease=1, **settings)
    workers = [site.worker(concurrency=1) for _ in range(2)]
    beat = ["--beat", f"--schedule={tmp_path / 'schedule'}"]
    ticking = site.worker(concurrency=1, queues=[site.new_queue()], arguments=beat)
    result = site.publish("keyed", key, 0.0, gate.path)
    (begun,) = wait_for(lambda: site.ledger.entries("start", key), 20, "the first run")
    lost = next(each for each in workers if begun.pid in each.children())
    survivor = next(each for each in workers if each is not lost)

    def sweeps() -> list[dict[str, Any]]:
        """Return the results of the sweeps so far."""
        ids = re.findall(rf"Task {re.escape(SWEEP)}\[(.+?)\] succeeded", survivor.log)
        return [site.result(each).get(timeout=30) for each in ids]

    # Alive, it is left alone, for several sweeps and longer than its lease.
    wait_for(lambda: len(sweeps()) >= 4, 20, lambda: f"4 sweeps: {ticking.tail()}")
    assert site.record("keyed", key).state is State.PROCESSING
    assert not any(each["interrupted"] for each in sweeps())

    lost.kill()
    wait_for(lambda: any(each["interrupted"] for each in sweeps()), 20, "the sweep")
    record = site.record("keyed", key)
    assert (record.state, record.crashes) == (State.INTERRUPTED, 1)
    assert "a sweep ended: interrupted 1" in survivor.log
    assert f"keyed key {key}" in survivor.log
    already = len(sweeps())
    wait_for(lambda: len(sweeps()) >= already + 2, 30, "two more sweeps")
    assert sum(each["interrupted"] for each in sweeps()) == 1
    assert site.record("keyed", key) == record
    assert site.ledger.count("interrupted", key) == 1

    # The message is gone, as early acks have it; whoever asks again is served at once.
    assert site.ledger.count("start", key) == 1
    assert result.state == "STARTED"
    gate.open()
    site.publish("keyed", key, 0.0, gate.path).get(timeout=30)
    record = site.record("keyed", key)
    assert (record.state, record.crashes, record.attempts) == (State.COMPLETED, 1, 2)
