"""``idempotency_on_stale``: what a sweep does about a run whose worker never came back."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from celery_idempotent import Record, get_store
from celery_idempotent.celery.sweep import SWEEP, sweep
from celery_idempotent.errors import ProcessingTimedOut
from celery_idempotent.records import State
from tests.policies.conftest import PATIENCE, Site
from tests.support.apps import environment
from tests.support.sites import RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for
from tests.support.workers import Worker, child_environment

#: The lease of the tasks of these tests, in seconds.
LEASE = 1.0

REDIS_FIRST = pytest.mark.parametrize("broker", [REDIS, RABBITMQ_TOO])


def lose(site: Site, name: str, key: str, gate: str, **options: Any) -> tuple[Worker, Any]:
    """Publish, and take the whole worker down while the task runs."""
    worker = site.worker(concurrency=2)
    result = site.publish(name, key, gate, **options)
    site.noted("start", key)
    worker.kill()
    return worker, result


def stale(site: Site, name: str, key: str) -> Record:
    """Return the record once its lease ran out."""
    record = site.record(name, key)
    assert record is not None
    assert record.state is State.PROCESSING
    time.sleep(LEASE + 0.3)
    return record


class TestFail:
    @REDIS_FIRST
    def test_a_lost_run_fails_for_good(self, open_site, key, gate, broker):
        site = open_site(broker)
        worker, first = lose(site, "timing_out", key, gate.path)
        stale(site, "timing_out", key)
        if broker == "redis":
            worker.start()
            counts = site.app.tasks[SWEEP].delay().get(timeout=PATIENCE)
        else:  # which gives the message back as soon as there is a worker
            counts = sweep(site.app)
            worker.start()
        assert (counts["interrupted"], counts["failed"]) == (1, 1)
        record = site.record("timing_out", key)
        assert record is not None
        assert (record.state, record.crashes) == (State.FAILED, 1)
        with pytest.raises(ProcessingTimedOut, match="did not come back"):
            site.publish("timing_out", key, gate.path).get(timeout=PATIENCE)
        # So does the task itself, should its message come back.
        if broker == "redis":
            site.deliver_again(site.receipt(first.id))
        with pytest.raises(ProcessingTimedOut, match="did not come back"):
            first.get(timeout=PATIENCE)
        assert site.ledger.count("start", key) == 1

    @REDIS_FIRST
    def test_a_message_that_comes_back_before_the_sweep_does_not_run(
        self, open_site, key, gate, broker
    ):
        """The main process saw its child die, and the message is there at once."""
        site = open_site(broker)
        worker = site.worker(concurrency=2)
        first = site.publish("timing_out", key, gate.path)
        site.noted("start", key)
        (start,) = site.ledger.entries("start", key)
        worker.kill_child(start.pid)
        with pytest.raises(ProcessingTimedOut, match="did not come back"):
            first.get(timeout=PATIENCE)
        assert site.ledger.count("start", key) == 1
        record = site.record("timing_out", key)
        assert record is not None
        assert (record.state, record.crashes) == (State.FAILED, 1)


class TestRequeue:
    @REDIS_FIRST
    def test_many_sweeps_send_a_lost_message_once(self, open_site, key, gate, broker):
        site = open_site(broker)
        worker, first = lose(site, "requeued", key, gate.path)
        assert site.length() == 0
        before = stale(site, "requeued", key)
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(lambda _: sweep(site.app), range(16)))
        assert sum(each["requeued"] for each in counts) == 1
        wait_for(lambda: site.length() == 1, PATIENCE, "one message")
        record = site.record("requeued", key)
        assert record is not None
        assert (record.state, record.crashes) == (State.QUEUED, 1)
        assert record.task_id == before.task_id == first.id
        gate.open()
        worker.start()
        assert first.get(timeout=PATIENCE)
        assert sweep(site.app)["requeued"] == 0
        assert site.received(first.id) == 2
        assert (site.ledger.count("start", key), site.ledger.count("end", key)) == (2, 1)

    def test_a_message_that_expired_meanwhile_runs_all_the_same(self, open_site, key, gate):
        """It began in time; a copy that a worker discards would be sent for ever."""
        site = open_site("redis")
        worker, first = lose(site, "requeued", key, gate.path, expires=2)
        stale(site, "requeued", key)
        time.sleep(2)
        sweep(site.app)
        gate.open()
        worker.start()
        wait_for(first.ready, PATIENCE, "the end")
        assert first.state == "SUCCESS"
        assert site.ledger.count("end", key) == 1

    def test_a_sweep_that_dies_before_it_sends_loses_nothing(self, open_site, key, gate):
        """The message is sent again after the deadline, and not before."""
        site = open_site("redis")
        worker, first = lose(site, "requeued", key, gate.path)
        stale(site, "requeued", key)
        program = """
            import os
            from celery.signals import before_task_publish
            from celery_idempotent.celery import sweep
            from tests.policies import app as app_module

            sweep.REQUEUE_MS = 6000
            before_task_publish.connect(lambda **_: os._exit(9), weak=False)
            sweep.sweep(app_module.app)
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            env=child_environment(environment(site.settings)),
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 9, done.stderr.decode()
        record = site.record("requeued", key)
        assert record is not None
        assert record.state is State.QUEUED
        assert (sweep(site.app)["requeued"], site.length()) == (0, 0)
        wait_for(lambda: sweep(site.app)["requeued"], PATIENCE, "the deadline", interval=0.1)
        assert time.time() * 1000 >= record.deadline_ms
        assert site.length() == 1
        gate.open()
        worker.start()
        assert first.get(timeout=PATIENCE)
        assert site.ledger.count("end", key) == 1

    def test_a_process_that_dies_before_its_retry_is_out_loses_nothing(self, shared, key):
        """The key is free, the retry is not published, and the broker has no message any more."""
        shared.crash("publishing a retry", key)
        first = shared.publish("requeued_retrying", key)
        shared.noted("crash", f"publishing a retry {key}")
        record = shared.record("requeued_retrying", key)
        assert record is not None
        assert (record.state, record.task_id) == (State.QUEUED, first.id)

        def ended() -> bool:
            sweep(shared.app)
            return bool(shared.ledger.count("end", key))

        wait_for(ended, PATIENCE, "the run of a retry", interval=0.2)
        assert first.get(timeout=PATIENCE)
        # Of the message that was lost, of the one that the sweep sent, of the retry.
        assert (shared.ledger.count("start", key), shared.ledger.count("end", key)) == (3, 1)

    def test_an_interrupted_run_keeps_what_it_needs_to_be_sent_again(self, open_site, key, gate):
        """As an operator would send it: the message has all options of the first."""
        site = open_site("redis")
        options: dict[str, Any] = {"priority": 3, "soft_time_limit": 50, "headers": {"mine": "x"}}
        worker, first = lose(site, "requeued", key, gate.path, **options)
        record = stale(site, "requeued", key)
        assert get_store(site.app).requeue(record.identity, deadline_ms=60_000) is not None
        assert sweep(site.app)["requeued"] == 0
        again = site.app.tasks["requeued"]._definition.codec.load_message(record.message)
        again.apply_async()
        gate.open()
        worker.start()
        first.get(timeout=PATIENCE)
        before, after = (e["headers"] for e in site.receipts(key))
        same = ("id", "task", "timelimit", "mine", "idempotency", "retries", "root_id")
        assert {name: after[name] for name in same} == {name: before[name] for name in same}
