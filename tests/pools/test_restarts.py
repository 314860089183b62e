"""A pool that changes while its worker runs: more children, and fewer."""

from __future__ import annotations

import uuid
from collections.abc import Callable

import pytest

from celery_idempotent import State
from tests.pools.conftest import PATIENCE, Site
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis]


def test_a_pool_that_grows_and_shrinks_leaves_nothing_undone(
    open_site: Callable[..., Site], key: str, gate: str
):
    site = open_site(idempotency_lease=2)
    worker = site.worker(
        "prefork",
        arguments=["--autoscale=5,1"],
        env={"AUTOSCALE_KEEPALIVE": "0.5"},
        fresh=True,  # it is read when Celery is imported
    )
    keys = [f"{key}-{number}" for number in range(5)]
    sent = [site.send("work", each, gate) for each in keys]
    for each in keys:
        site.noted("start", each)
    assert len({e.pid for each in keys for e in site.ledger.entries("start", each)}) == 5
    site.open(gate)
    for result in sent:
        site.value(result)
    # It shrinks to one, and grows again; then it is given work while more of its children are about to end.
    for wanted in (1, 4):
        wait_for(
            lambda wanted=wanted: len(worker.children()) <= wanted,  # type: ignore[misc]
            PATIENCE,
            f"the pool to shrink to {wanted}",
        )
        burst = [f"{key}-{uuid.uuid4().hex}" for _ in range(8)]
        for result in [site.send("work", each) for each in burst + burst]:
            site.value(result)
        keys += burst
    for each in keys:
        site.completed(each)
        record = site.record(each)
        assert (record.state, record.crashes) == (State.COMPLETED, 0)
        assert site.count("effect", each) == 1, site.ledger.entries(key=each)
