"""``idempotency_on_stale``: what a sweep does about a run whose worker never came back."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from celery import chain

from celery_idempotent import Record, get_store
from celery_idempotent.celery.sweep import SWEEP, sweep
from celery_idempotent.records import State
from tests.delivery.app import Refused
from tests.delivery.conftest import Site
from tests.support.apps import environment
from tests.support.ledger import Entry
from tests.support.preloaded import Process, spawn
from tests.support.sites import RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for
from tests.support.workers import Worker, child_environment

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture
def site(request, open_site):
    """A site whose leases last a second."""
    return open_site(getattr(request, "param", "redis"), idempotency_lease=1)


ON_BOTH = pytest.mark.parametrize("site", [REDIS, RABBITMQ_TOO], indirect=True)


def lose(site: Site, name: str, *args: Any, **options: Any) -> tuple[Worker, Any]:
    """Publish, take the whole worker down while the task runs, and wait for the end of its lease."""
    worker = site.worker(concurrency=2)
    message = site.message(name, *args, **options)
    result = site.deliver(message)
    wait_for(lambda: site.ledger.count("start", args[0]), 30, "the run")
    worker.kill()
    stale = found(site, name, args[0])
    assert stale.state is State.PROCESSING
    wait_for(lambda: stale.stale(get_store(site.app).now_ms()), what="the end of the lease")
    return worker, (result, message)


def found(site: Site, name: str, key: str) -> Record:
    record = site.record(name, key)
    assert record is not None
    return record


class TestRequeue:
    @ON_BOTH
    def test_many_sweeps_send_a_lost_message_once(self, site, key, gate):
        """Though it expired meanwhile: it began in time, and a copy that a worker discards would be sent for ever."""
        expired = time.time() + 4
        worker, (first, _) = lose(site, "requeued", key, 0.0, gate.path, expires=4)
        assert site.length() == 0
        wait_for(lambda: time.time() > expired, what="the time at which it expires")
        with ThreadPoolExecutor(8) as pool:
            counts = list(pool.map(lambda _: sweep(site.app), range(16)))
        assert sum(each["requeued"] for each in counts) == 1
        wait_for(lambda: site.length() == 1, what="one message")
        record = found(site, "requeued", key)
        assert (record.state, record.crashes, record.task_id) == (State.QUEUED, 1, first.id)
        gate.open()
        worker.start()
        assert first.get(timeout=30)
        assert sweep(site.app)["requeued"] == 0
        assert site.ledger.count("received", task_id=first.id) == 2
        assert (site.ledger.count("start", key), site.ledger.count("end", key)) == (2, 1)

    def test_an_interrupted_run_keeps_what_it_needs_to_be_sent_again(self, site, key, gate):
        """As an operator would send it: the message has all options of the first."""
        options: dict[str, Any] = {"priority": 3, "soft_time_limit": 50, "headers": {"mine": "x"}}
        _, (_, message) = lose(site, "requeued", key, 0.0, gate.path, **options)
        record = found(site, "requeued", key)
        assert get_store(site.app).requeue(record.identity, deadline_ms=60_000) is not None
        assert sweep(site.app)["requeued"] == 0
        again = site.app.tasks["requeued"]._definition.codec.load_message(record.message)
        again.apply_async()
        (sent,) = site.take(site.queue, 1)
        same = ("id", "task", "timelimit", "mine", "idempotency", "retries", "root_id")
        assert {name: sent.headers[name] for name in same} == {
            name: message.headers[name] for name in same
        }


@ON_BOTH
def test_a_failed_task_that_keeps_its_message_runs_again(site, key):
    """Its result goes from FAILURE to SUCCESS, and the rest of its chain runs."""
    site.worker(concurrency=1)
    task = site.app.tasks["refused_once"]
    last = chain(task.s(key), site.app.tasks["appending"].s())()
    first = last.parent
    with pytest.raises(Refused):
        first.get(timeout=30)
    assert found(site, "refused_once", key).message is not None
    assert task.idempotency_requeue(key, who="alice")
    for each in first, last:  # Celery failed the rest of the chain, too
        end = partial(site.app.AsyncResult, each.id)
        wait_for(lambda end=end: end().state == "SUCCESS", 30, "the second run", interval=0.1)
    record = found(site, "refused_once", key)
    assert (record.state, record.message, record.attempts) == (State.COMPLETED, None, 2)
    assert not task.idempotency_requeue(key), "what took effect"


def first_run(site: Site, key: str) -> Entry:
    return wait_for(lambda: site.ledger.entries("start", key), 20, "the first run")[0]


class TestTheSweep:
    @pytest.fixture
    def start_beat(self, tmp_path) -> Iterator[Callable[[Site], Path]]:
        """Start Celery's beat as a process; return where its log is."""
        started: list[Process | subprocess.Popen[bytes]] = []

        def start_beat(site: Site) -> Path:
            log_path: Path = tmp_path / "beat.log"
            command = [sys.executable, "-m", "celery", "-A", "tests.delivery.app", "beat"]
            options = ["--loglevel=INFO", "--pidfile=", f"--schedule={tmp_path / 'schedule'}"]
            with log_path.open("wb") as log:
                env = child_environment(environment(site.settings))
                beat = spawn([*command, *options], cwd=tmp_path, env=env, log=log)
            started.append(beat)
            return log_path

        yield start_beat
        for beat in started:
            os.killpg(beat.pid, signal.SIGKILL)
            beat.wait()

    @pytest.mark.parametrize("broker", [REDIS, RABBITMQ_TOO], indirect=True)
    def test_registers_itself_with_beat_and_interrupts_what_nobody_will_redeliver(
        self, broker, open_site, start_beat, key, gate
    ):
        site = open_site(
            broker, idempotency_lease=1, idempotency_sweep_interval=0.5, task_acks_late=False
        )
        workers = [site.worker(concurrency=1) for _ in range(2)]
        beat_log = start_beat(site)
        result = site.publish("keyed", key, 0.0, gate.path)
        begun = first_run(site, key)
        lost = next(each for each in workers if begun.pid in each.children())
        survivor = next(each for each in workers if each is not lost)

        def sweeps() -> list[dict[str, Any]]:
            """Return the results of the sweeps so far."""
            ids = re.findall(rf"Task {re.escape(SWEEP)}\[(.+?)\] succeeded", survivor.log)
            return [site.result(each).get(timeout=30) for each in ids]

        # Alive, it is left alone, for several sweeps and longer than its lease.
        wait_for(lambda: len(sweeps()) >= 4, 20, lambda: f"4 sweeps: {beat_log.read_text()}")
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
