"""Options that are settings of the app, also through a namespace as in Django, take effect on a worker."""

from __future__ import annotations

import pytest

from celery_idempotent.records import State
from tests.policies.conftest import PATIENCE
from tests.support.waiting import wait_for

PLAIN_TOO = pytest.mark.parametrize(
    "prefix", [pytest.param("", id="settings", marks=pytest.mark.wide), "CELERY"]
)
NAMESPACE_TOO = pytest.mark.parametrize(
    "prefix", ["", pytest.param("CELERY", marks=pytest.mark.wide)]
)


class TestOnAWorker:
    @PLAIN_TOO
    def test_settings_take_effect(self, open_site, key, gate, prefix):
        """One worker whose every task has these policies; the publisher of this process has them, too."""
        site = open_site(
            "redis",
            idempotency_on_conflict="ignore",
            idempotency_publish_once=True,
            idempotency_on_stale="requeue",
            idempotency_lease={"seconds": 20},
        )
        site.worker(concurrency=2, wanted={"prefix": prefix})
        first = site.publish("work", key, gate.path)
        site.noted("start", key)
        assert site.publish("work", key, gate.path).id == first.id
        record = site.record("work", key)
        assert record is not None
        assert (record.on_stale, record.message is not None) == ("requeue", True)
        assert record.deadline_ms is not None
        assert 19_000 < record.deadline_ms - record.updated_ms <= 27_000

        second = site.app.send_task("work", args=(key, gate.path))
        wait_for(lambda: second.state == "IGNORED", PATIENCE, "the duplicate to be ignored")
        gate.open()
        first.get(timeout=PATIENCE)
        record = site.record("work", key)
        assert record is not None
        assert record.state is State.COMPLETED
        assert site.ledger.count("start", key) == 1

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
