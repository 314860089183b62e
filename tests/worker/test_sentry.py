"""Sentry hears of an operation once: of its permanent error, and whether a scheduled run was done."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.apps import close_app
from tests.support.ledger import Ledger
from tests.support.servers import EmbeddedRedis
from tests.support.sites import Gate
from tests.support.waiting import wait_for
from tests.support.workers import Worker
from tests.worker.sentry_app import make_app

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture
def worker(private_redis: EmbeddedRedis, start_worker: Callable[..., Worker]) -> Worker:
    env = {"SENTRY_REDIS_URL": private_redis.url()}
    # Sentry replaces a function that Celery's worker imports by its name.
    return start_worker(
        "tests.worker.sentry_app", pool="threads", concurrency=2, env=env, fresh=True
    )


@pytest.fixture
def app(private_redis: EmbeddedRedis, worker: Worker) -> Iterator[Any]:
    app = make_app(private_redis.url())
    yield app
    close_app(app)


def test_a_permanent_error_is_reported_when_it_happens_and_not_at_every_replay(
    app: Any, ledger: Ledger
) -> None:
    refusing = app.tasks["refusing"]
    for key in ("a", "a", "a", "b"):
        with pytest.raises(Exception, match=key):
            refusing.delay(key).get(timeout=30)
    wait_for(lambda: ledger.count("event", "Refused b"), 20, "the second error")
    assert [each.key for each in ledger.entries("event")] == ["Refused a", "Refused b"]


def test_a_scheduled_run_that_waits_for_another_is_no_failure_of_its_monitor(
    app: Any, ledger: Ledger, worker: Worker, gate: Gate
) -> None:
    monitor = {
        "sentry-monitor-slug": "nightly",
        "sentry-monitor-check-in-id": "0" * 32,
        "sentry-monitor-start-timestamp-s": "1",
        "sentry-monitor-config": {},
    }
    report = app.tasks["report"]
    first = report.delay("k", gate.path)
    wait_for(lambda: ledger.count("start", "k"), 30, "the first run")
    again = report.apply_async(("k", gate.path), headers=monitor)
    wait_for(
        lambda: re.search(rf"{again.id}\] found .* \(conflict 2\)", worker.log), 20, "two rounds"
    )
    gate.open()
    assert first.get(timeout=30) == again.get(timeout=30) == "k"
    wait_for(lambda: ledger.count("check-in"), 20, "the check-in")
    assert [each.key for each in ledger.entries("check-in")] == ["ok"]
