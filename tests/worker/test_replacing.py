"""A task that was replaced has succeeded: no errback runs for it, however exceptions are pickled."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.apps import close_app
from tests.support.ledger import Ledger
from tests.support.servers import EmbeddedRedis
from tests.worker.replacing_app import make_app

pytestmark = [pytest.mark.worker, pytest.mark.redis]


def test_no_errback_runs_for_orders_that_were_paid_by_a_replacement(
    private_redis: EmbeddedRedis, start_worker: Callable[..., Any], ledger: Ledger
) -> None:
    url = private_redis.url()
    worker = start_worker(
        "tests.worker.replacing_app", concurrency=2, env={"REPLACING_REDIS_URL": url}
    )
    app = make_app(url)
    refund = app.tasks["refund"].s()
    sent = [app.tasks["order"].apply_async((each,), link_error=refund) for each in range(10)]
    assert [each.get(timeout=30) for each in sent] == list(range(10))
    worker.stop()
    assert (ledger.count("paid"), ledger.count("refunded")) == (10, 0)
    assert "PicklingError" not in worker.log
    close_app(app)
