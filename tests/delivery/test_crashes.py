"""Processes that die: what they held runs again, once, and is then recorded with the crash that it took."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from celery_idempotent import State
from celery_idempotent.celery.sweep import SWEEP
from tests.support.apps import environment
from tests.support.preloaded import Process, spawn
from tests.support.sites import RABBITMQ_TOO, REDIS
from tests.support.waiting import wait_for
from tests.support.workers import child_environment

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.delivery.conftest import Site
    from tests.support.ledger import Entry

pytestmark = [pytest.mark.worker, pytest.mark.redis]


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
        workers = site.workers(2, concurrency=1)
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
