"""The thread that tells the store of lost children: the pool may fork while it works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.celery.delivery import identify_delivery
from celery_idempotent.records import State
from celery_idempotent.stores import get_store
from tests.delivery.app import make_app
from tests.faults.conftest import Stage
from tests.support.apps import environment
from tests.support.records import claim_key
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.workers import alive, child_environment

pytestmark = [pytest.mark.worker, pytest.mark.redis]

#: What the main process of a worker does with its first lost child, and which modules that imports in which thread.
_PROGRAM = """
import subprocess, sys, threading, time

import celery.bin.worker, celery.concurrency.prefork, celery.worker.request, kombu.transport.pyamqp
from celery_idempotent.celery import worker
from celery_idempotent.signals import worker_name
from tests.delivery.app import app

app.finalize()
task = app.tasks["work"]
imported = []

class Notice:
    def find_spec(self, name, path=None, target=None):
        if threading.current_thread() is not threading.main_thread():
            imported.append(name)

sys.meta_path.insert(0, Notice())
ended = subprocess.Popen(["true"])
ended.wait()
print(worker_name(ended.pid), flush=True)
sys.stdin.readline()

class Delivery:
    task, id, worker_pid = task, "t", ended.pid
    request_dict, _payload, _loss_handled = {}, (["k"], {}, {}), False
    _child_lost = worker.Request._child_lost

threads = []
start = threading.Thread.start
threading.Thread.start = lambda self: (threads.append(self), start(self))[1]
Delivery()._child_lost()
assert {thread.name for thread in threads} == {"idempotency-background"}, threads
for thread in threads:
    thread.join()
print("imported:", *imported)
"""


def test_it_imports_nothing(private_redis: EmbeddedRedis, tmp_path: Path):
    """A child forked meanwhile would wait for ever for the lock of a module that nobody imports there."""
    conf = {"broker_url": "memory://", "idempotency_store": private_redis.url()}
    main = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        cwd=tmp_path,
        env=child_environment(environment(conf)),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with main:
        assert main.stdout is not None
        lost = main.stdout.readline().strip()
        app = make_app(conf)
        task: Any = app.tasks["work"]
        record = claim_key(
            get_store(app),
            identify_delivery(task._definition, {}, ["k"], {}, task_id="t").identity,
            keep_ms=30_000,
            task_id="t",
            worker=lost,
        )
        output, _ = main.communicate("go on\n", timeout=60)
    assert main.returncode == 0
    # It did all that it can have to do.
    record = task.idempotency_record("k")
    assert (record.state, record.crashes) == (State.INTERRUPTED, 1)
    assert output == "imported:\n"
    get_store(app).close()


@pytest.mark.rabbitmq
def test_it_lets_nobody_in_before_the_child_is_gone(set_stage: Callable[..., Stage]):
    stage = set_stage()
    stage.worker()
    # The limit is announced at once; a child that is deaf to SIGTERM lives for another 0.1 s.
    late = stage.publish("work", "k", "hangs deaf once", time_limit=2)
    child = stage.started("k")
    lived = True

    def interrupted() -> bool:
        nonlocal lived
        if stage.state("k") is not State.INTERRUPTED:
            return False
        lived = alive(child)
        return True

    wait_for(interrupted, 30, "the claim to be interrupted", interval=0.002)
    assert not lived
    assert type(stage.fails(late)).__name__ == "TimeLimitExceeded"
    assert stage.record("k").crashes == 1
    stage.tells("interrupted", "k")
    stage.ran_once("k", stage.publish("work", "k"))
    assert stage.length() == 0
