"""Messages that arrive more than once, in whatever way brokers and clients find to do that, run once."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest
from celery.result import AsyncResult

from celery_idempotent import FingerprintMismatch, State
from tests.support.waiting import wait_for
from tests.support.workers import child_environment

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.worker.conftest import Site

pytestmark = [pytest.mark.worker, pytest.mark.redis]

OWN = {"STARTED", "SUCCESS"}


def results(site: Site, *task_ids: str) -> list[Any]:
    return [site.result(task_id).get(timeout=20) for task_id in task_ids]


def wait_for_phase(site: Site, count: int, phase: str, **which: str) -> None:
    wait_for(
        lambda: site.ledger.count(phase, **which) >= count,
        20,
        lambda: f"{count} × {phase} of {which}; ledger: {site.ledger.entries(**which)}",
    )


class TestTheSameMessage:
    def test_delivered_again_after_its_end_is_answered_without_a_run(self, shared, key):
        message = shared.message("keyed", key)
        first = shared.deliver(message).get(timeout=20)
        states = shared.states(message.task_id)
        shared.deliver(message, times=3)
        wait_for_phase(shared, 3, "replayed", task_id=message.task_id)
        assert shared.ledger.count("start", key) == 1
        assert shared.conflicts(message.task_id) == 0
        assert results(shared, message.task_id) == [first]
        assert set(states.names()) <= {"SUCCESS"}


class TestOneKey:
    def test_published_five_times_at_once_runs_once_and_everyone_gets_the_first_answer(
        self, shared, key, gate
    ):
        published = [shared.publish("keyed", key, 0.0, gate.path) for _ in range(5)]
        wait_for_phase(shared, 4, "conflicted", key=key)
        gate.open()
        answers = results(shared, *(each.id for each in published))
        assert shared.ledger.count("start", key) == shared.ledger.count("end", key) == 1
        assert len({each.id for each in published}) == 5
        assert answers == [answers[0]] * 5
        record = shared.record("keyed", key)
        assert record is not None
        assert record.state is State.COMPLETED
        assert record.task_id == shared.ledger.entries("start", key)[0].task_id

    def test_of_a_task_without_a_rule_can_be_given_with_each_call(self, shared, key):
        tasks = shared.app.tasks
        calls = [
            tasks["guarded"].apply_async(("a",), idempotency_key=key),
            tasks["guarded"].si("a").set(idempotency_key=key).apply_async(),
            shared.app.send_task("guarded", ("a",), headers={"idempotency_key": key}),
        ]
        answers = results(shared, *(each.id for each in calls))
        assert answers == [answers[0]] * 3
        assert sum(shared.ledger.count("start", task_id=each.id) for each in calls) == 1


class TestAMessageOfAnOldPublisher:
    """Its app does not import the library: no header, so the worker finds the key."""

    @pytest.fixture
    def send(self, shared) -> Callable[..., list[AsyncResult[Any]]]:
        program = """if True:
            import json, sys
            from celery import Celery
            settings, calls = json.load(sys.stdin)
            app = Celery()
            app.conf.update(settings)
            ids = [app.send_task(name, args, **options).id for name, args, options in calls]
            assert not [name for name in sys.modules if name.startswith("celery_idempotent")]
            json.dump(ids, sys.stdout)
        """
        needed = ("broker_url", "result_backend", "task_default_queue")
        settings = {name: shared.settings[name] for name in needed}

        def send(*calls: tuple[str, list[Any], dict[str, Any]]) -> list[AsyncResult[Any]]:
            done = subprocess.run(
                [sys.executable, "-c", program],
                input=json.dumps([settings, calls]),
                env=child_environment(),
                capture_output=True,
                text=True,
                timeout=30,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            return [shared.result(task_id) for task_id in json.loads(done.stdout)]

        return send

    def test_has_the_key_that_a_new_publisher_would_give_it(self, shared, key, send):
        old = send(("keyed", [key], {}), ("keyed", [key, 0.0], {}))
        answers = [each.get(timeout=20) for each in old]
        new = shared.publish("keyed", key)
        assert answers == [new.get(timeout=20)] * 2
        assert shared.ledger.count("start", key) == 1
        mismatched = send(("keyed", [key, 0.01], {}))
        with pytest.raises(FingerprintMismatch):
            mismatched[0].get(timeout=20)

    @pytest.mark.parametrize("protocol", [1, 2])
    def test_may_be_written_by_hand_in_any_protocol(self, shared, key, protocol):
        task_id = str(uuid.uuid4())
        if protocol == 1:
            headers: dict[str, Any] = {}
            body: Any = {"task": "keyed", "id": task_id, "args": [key], "kwargs": {}}
        else:
            headers = {"task": "keyed", "id": task_id}
            body = [[key], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None}]
        queue = shared.app.amqp.queues[shared.queue]
        for _ in range(2):
            with shared.app.producer_pool.acquire(block=True) as producer:
                producer.publish(
                    body,
                    exchange=queue.exchange,
                    routing_key=queue.routing_key,
                    declare=[queue],
                    serializer="json",
                    correlation_id=task_id,
                    headers=headers,
                )
        by_hand = shared.result(task_id).get(timeout=20)
        assert shared.publish("keyed", key).get(timeout=20) == by_hand
        wait_for_phase(shared, 2, "replayed", key=key)
        assert shared.ledger.count("start", key) == 1


class TestAReplacement:
    def test_is_not_made_again_by_a_redelivery_while_it_works_or_after_its_end(
        self, shared, key, gate
    ):
        message = shared.message("replacing", key, "a", gate.path)
        states = shared.states(message.task_id)
        result = shared.deliver(message)
        wait_for_phase(shared, 1, "appended", key=key)
        record = shared.record("replacing", key)
        assert record is not None
        assert (record.state, record.replaced) == (State.COMPLETED, True)

        shared.deliver(message, times=2)
        wait_for_phase(shared, 2, "replayed", task_id=message.task_id)
        self.let_others_through(shared, key)
        assert set(states.names()) == {"STARTED"}
        gate.open()
        assert result.get(timeout=20) == "a!"

        shared.deliver(message, times=2)
        wait_for_phase(shared, 4, "replayed", task_id=message.task_id)
        self.let_others_through(shared, key)
        assert shared.ledger.count("start", key) == shared.ledger.count("appended", key) == 1
        assert result.get(timeout=20) == "a!"
        assert set(states.names()) == OWN

    def let_others_through(self, shared: Site, key: str) -> None:
        """Give every free process something else to do: what it did before is over then."""
        results(shared, *(shared.publish("guarded", f"{key}.next", 0.1).id for _ in range(4)))

    def test_answers_a_duplicate_under_another_id_when_it_is_done(self, shared, key, gate):
        first = shared.publish("replacing", key, "a", gate.path)
        wait_for_phase(shared, 1, "appended", key=key)
        message = shared.message("replacing", key, "a", gate.path)
        states = shared.states(message.task_id)
        second = shared.deliver(message)
        # Longer than the lease of the task that was replaced.
        wait_for(lambda: states.names().count("RETRY") >= 4, 20, lambda: f"RETRY: {states.names()}")
        gate.open()
        assert results(shared, first.id, second.id) == ["a!", "a!"]
        assert shared.ledger.count("start", key) == shared.ledger.count("appended", key) == 1
