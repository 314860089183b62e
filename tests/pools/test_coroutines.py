"""celery-aio-pool keeps one request for all messages of a task and runs coroutines: each run is under its claim."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent import State
from tests.support.apps import close_app
from tests.support.ledger import Ledger
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture
def worker(private_redis: EmbeddedRedis, start_worker: Callable[..., Worker]) -> Worker:
    env = {
        "POOL_REDIS_URL": private_redis.url(),
        "CELERY_CUSTOM_WORKER_POOL": "celery_aio_pool.pool:AsyncIOPool",
    }
    return start_worker("tests.pools.coroutines_app", pool="custom", env=env)


@pytest.fixture
def app(private_redis: EmbeddedRedis, worker: Worker) -> Iterator[Any]:
    from tests.pools.coroutines_app import make_app

    app = make_app(private_redis.url())
    yield app
    close_app(app)


def test_a_coroutine_is_completed_when_it_is_done_and_runs_again_if_it_is_not(
    app: Any, ledger: Ledger, worker: Worker, tmp_path: Path
) -> None:
    awaited = app.tasks["awaited"]
    gate = tmp_path / "gate"
    awaited.apply_async(("k", str(gate)), ignore_result=True)
    wait_for(lambda: ledger.count("start", "k"), 30, "the first run")
    assert awaited.idempotency_record("k").state is State.PROCESSING
    worker.kill()
    gate.touch()
    worker.start()
    again = awaited.delay("k", str(gate))
    answer = again.get(timeout=30)
    assert (ledger.count("start", "k"), ledger.count("effect", "k")) == (2, 1)
    assert awaited.idempotency_record("k").state is State.COMPLETED
    assert awaited.delay("k", str(gate)).get(timeout=30) == answer
    assert ledger.count("start", "k") == 2
