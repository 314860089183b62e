"""A chain object that is applied twice runs twice, although Celery gives its last step one id."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from celery import chain, chord

from tests.support.apps import close_app
from tests.support.ledger import Ledger
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for
from tests.worker.chain_app import make_app

pytestmark = [pytest.mark.worker, pytest.mark.redis]


@pytest.fixture
def app(private_redis: EmbeddedRedis, start_worker: Callable[..., Any]) -> Any:
    url = private_redis.url()
    start_worker("tests.worker.chain_app", concurrency=2, env={"CHAIN_REDIS_URL": url})
    app = make_app(url)
    yield app
    close_app(app)


def test_every_step_of_every_application_runs(app: Any, ledger: Ledger) -> None:
    add = app.tasks["add"]
    pipeline = chain(add.s(1), add.s(2))
    pipeline.apply_async((0,))
    pipeline.apply_async((1,))
    wait_for(lambda: ledger.count("add") == 4, 20, lambda: str(ledger.entries()))
    assert sorted(e.key for e in ledger.entries()) == ["0+1", "1+1", "1+2", "2+2"]


def test_a_retried_head_does_not_make_its_last_step_another(app: Any, ledger: Ledger) -> None:
    add = app.tasks["add"]
    result = chain(add.s(0, 1, retry=True), add.s(2), add.s(3)).apply_async()
    assert result.get(timeout=20) == 6
    assert [e.key for e in ledger.entries()] == ["0+1", "1+2", "3+3"]


def test_a_chord_at_the_end_runs_its_body_in_every_application(app: Any, ledger: Ledger) -> None:
    add, total = app.tasks["add"], app.tasks["total"]
    pipeline = chain(add.s(1), chord([add.s(10), add.s(20)], total.s()))
    pipeline.apply_async((0,))
    wait_for(lambda: ledger.count("total") == 1, 20, lambda: str(ledger.entries()))
    pipeline.apply_async((1,))
    wait_for(lambda: ledger.count("total") == 2, 20, lambda: str(ledger.entries()))
    assert [e.key for e in ledger.entries("total")] == ["32", "34"]
