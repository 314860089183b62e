"""Options that are settings of the app, also through a namespace as in Django, take effect on a worker."""

from __future__ import annotations

import pytest

from tests.policies.conftest import PATIENCE

NAMESPACE_TOO = pytest.mark.parametrize(
    "prefix", ["", pytest.param("CELERY", marks=pytest.mark.wide)]
)


class TestOnAWorker:
    @NAMESPACE_TOO
    def test_the_time_to_wait_takes_effect(self, open_site, key, gate, prefix):
        site = open_site(
            "redis", idempotency_on_conflict="wait", idempotency_wait={"milliseconds": 700}
        )
        site.worker(concurrency=2, wanted={"prefix": prefix})
        first = site.publish("work", key, gate.path)
        site.noted("start", key)
        second = site.publish("work", key, gate.path)
        site.noted("postrun", task_id=second.id)
        began, ended = (
            site.ledger.entries(phase, task_id=second.id)[0].time for phase in ("prerun", "postrun")
        )
        assert 0.7 <= ended - began < 5
        gate.open()
        assert second.get(timeout=PATIENCE) == first.get(timeout=PATIENCE)
