"""Other pools, no result backend, and results that cannot be kept or read."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from celery_idempotent.records import State
from tests.faults.conftest import Stage
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.worker, pytest.mark.redis, pytest.mark.rabbitmq]

SetStage = Callable[..., Stage]


class TestPools:
    def test_threads_run_duplicates_once_and_renew_their_claims(self, set_stage: SetStage):
        stage = set_stage(idempotency_lease=1)
        stage.worker(pool="threads", concurrency=4)
        sent = {key: [stage.send("work", key, "", "gate") for _ in range(4)] for key in "ab"}
        for key in sent:
            stage.started(key)
        first = {key: stage.record(key) for key in sent}
        # For three leases.
        until = time.monotonic() + 3
        while time.monotonic() < until:
            for key, before in first.items():
                record = stage.record(key)
                assert (record.state, record.token) == (State.PROCESSING, before.token)
            time.sleep(0.1)
        assert all(stage.record(key).deadline_ms > first[key].deadline_ms + 1000 for key in sent)
        stage.open("gate")
        for key, results in sent.items():
            assert len({stage.succeeds(result) for result in results}) == 1
            assert stage.effects(key) == stage.starts(key) == 1
            assert stage.record(key).crashes == 0


class TestResults:
    def test_without_a_result_backend_duplicates_are_answered_from_the_record(
        self, set_stage: SetStage
    ):
        stage = set_stage(backend_url=None, idempotency_lease=1)
        worker = stage.worker()
        first = stage.send("work", "k")
        wait_for(lambda: stage.state("k") is State.COMPLETED, what="the run")
        again = stage.send("work", "k")
        wait_for(
            lambda: f"Task work[{again.id}] succeeded" in worker.log, what="the duplicate's answer"
        )
        line = next(line for line in worker.log.splitlines() if f"[{again.id}] succeeded" in line)
        assert f"done by {first.id}" in line
        # And a value that the record does not keep is nowhere else.
        stage.send("value", "set", "a set")
        wait_for(lambda: stage.state("set", "value") is State.COMPLETED, what="the run")
        again = stage.send("value", "set", "a set")
        wait_for(lambda: stage.told("replayed", "set"), what="the replay")
        wait_for(
            lambda: f"value[{again.id}] raised unexpected: ResultUnavailable" in worker.log,
            what="the duplicate to be told",
        )
        assert stage.effects("set") == stage.effects("k") == 1

    def test_a_result_that_cannot_be_serialized_completes_without_it(self, set_stage: SetStage):
        stage = set_stage(idempotency_lease=1)
        worker = stage.worker()
        first = stage.send("value", "k", "a set")
        # Celery cannot store it either, and says so.
        assert type(stage.fails(first)).__name__ in ("EncodeError", "TypeError")
        record = stage.record("k", "value")
        assert (record.state, record.value) == (State.COMPLETED, None)
        assert "is not kept in its record (a set cannot be written as json" in worker.log
        assert "{1, 2}" not in worker.log.split("is not kept")[0]
        duplicate = stage.send("value", "k", "a set")
        assert type(stage.fails(duplicate)).__name__ in ("EncodeError", "TypeError")
        assert stage.effects("k") == 1
