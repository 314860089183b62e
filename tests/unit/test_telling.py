"""Each outcome is told once wherever it comes from: one event, one count, one line, all with the same facts."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.utils.dispatch import Signal

from celery_idempotent import FingerprintMismatch, IdempotentTask, current_claim, signals
from celery_idempotent.celery import operations, sweep
from celery_idempotent.celery.worker import interrupt_claim
from celery_idempotent.errors import FailedByOperator, ProcessingTimedOut, StoreUnavailable
from celery_idempotent.records import (
    Identity,
    Record,
    Reserved,
    ReserveRequest,
    SettleRequest,
    State,
)
from celery_idempotent.signals import worker_name
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock, deliver
from tests.support.records import claim_key
from tests.support.telling import Heard, assert_told, documented, listening

TASK, NAMESPACE = "shop.charge", "billing"
KEY = Identity(namespace=NAMESPACE, key="o")


def claim(store: MemoryStore, identity: Identity, **more: Any) -> Record:
    """Hold a key for another process."""
    return claim_key(store, identity, lease_ms=5000, **more)


class Place(NamedTuple):
    """Where an outcome may come from."""

    app: Celery
    task: Any
    store: MemoryStore
    clock: FakeClock
    heard: Heard

    def claim(self, worker: str = "host:1", **more: Any) -> Record:
        """Hold the key for another process."""
        return claim(self.store, KEY, worker=worker, **more)

    def reserve(self) -> Record:
        """Reserve the key for another process."""
        answer = self.store.reserve(
            ReserveRequest(identity=KEY, task_id="other", deadline_ms=60_000, keep_ms=60_000)
        )
        assert isinstance(answer, Reserved)
        return answer.record

    def run(self, then: Callable[[], object] = lambda: None) -> None:
        with suppress(Exception):
            self.task.apply(("o", then), task_id="t").get()

    def sweep(self) -> dict[str, Any]:
        self.clock.advance(6000)
        return sweep.sweep(self.app)

    def operate(self, operation: operations.Operation, record: Record, **about: Any) -> None:
        about = {"who": "ada", "reason": "it is\nstuck"} | about
        outcome = operations.operate(
            self.app,
            KEY,
            operations.OperationRequest(operation, force=True, **about),
            token=record.token,
            state=record.state,
        )
        assert outcome is operations.Outcome.DONE

    def message(self) -> bytes:
        signature = self.task.signature(("o",), task_id="other")
        message: bytes = self.task.idempotency_definition().codec.dump_message(signature)
        return message

    def fail(self, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
        def fails(*_: object, **__: object) -> None:
            raise StoreUnavailable("away")

        monkeypatch.setattr("celery_idempotent.protocol.run.CLAIM_SECONDS", 0)
        monkeypatch.setattr(MemoryStore, verb, fails)


def make_place(heard: Heard, **options: Any) -> Place:
    clock = FakeClock()
    store = MemoryStore(clock)
    app = Celery("showing", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=store, task_eager_propagates=True)

    @app.task(
        name=TASK,
        base=IdempotentTask,
        shared=False,
        idempotency_key="order_id",
        idempotency_namespace=NAMESPACE,
        idempotency_permanent_errors=(KeyError,),
        idempotency_fingerprint=("amount",),
        **{"idempotency_lease": 5, **options},
    )
    def charge(order_id: str, then: Callable[[], object] = lambda: None, amount: int = 1) -> object:
        return then()

    charge.idempotency_policy  # noqa: B018  finalizes the app
    return Place(app, app.tasks[TASK], store, clock, heard)


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening() as heard:
        yield heard


def raising(error: BaseException) -> Callable[[], object]:
    def then() -> object:
        raise error

    return then


def told(place: Place, *expected: str, who: str = "") -> None:
    assert_told(
        place.heard,
        *expected,
        task=TASK,
        namespace=NAMESPACE,
        who=who or worker_name(os.getpid()),
    )
    for name, sender, _ in place.heard.events:
        assert sender is (None if name == "swept" else place.app.tasks[TASK])


class TestWorker:
    @pytest.mark.parametrize(
        ("error", "end"),
        [(None, "settled COMPLETED"), (KeyError(), "settled FAILED"), (ValueError(), "released")],
    )
    def test_a_run_and_with_what_it_failed(self, heard, error, end):
        place = make_place(heard)
        place.run(raising(error) if error else lambda: None)
        told(place, "claimed PROCESSING", end)
        assert heard.events[-1][2].error is error

    def test_a_run_that_fails_after_a_step_leaves_it_interrupted(self, heard):
        place = make_place(heard)

        def then() -> None:
            running = current_claim()
            assert running is not None
            running.step("first", lambda: 1)
            raise ValueError

        place.run(then)
        told(place, "claimed PROCESSING", "released INTERRUPTED")
        record = place.store.get(KEY)
        assert record is not None
        assert record.state is State.INTERRUPTED

    def test_a_release_that_found_a_newer_claim_is_a_lost_lease_alone(self, heard):
        place = make_place(heard)

        def then() -> None:
            place.clock.advance(6000)
            place.store.settle(
                SettleRequest(record=place.claim(), state=State.COMPLETED, value=None, keep_ms=9000)
            )
            raise ValueError

        place.run(then)
        told(place, "claimed PROCESSING", "lease_lost", "replayed")

    def test_a_duplicate_of_what_is_done(self, heard):
        place = make_place(heard)
        place.run()
        place.run()
        told(place, "claimed PROCESSING", "settled COMPLETED", "replayed")

    def test_a_duplicate_of_what_is_at_work(self, heard):
        place = make_place(heard)
        place.claim()
        place.run()
        told(place, "conflicted")
        assert heard.events[0][2].record.owner == "other@host:1"

    def test_other_arguments(self, heard):
        place = make_place(heard)
        place.run()
        with pytest.raises(FingerprintMismatch):
            place.task.apply(("o",), {"amount": 2})
        told(place, "claimed PROCESSING", "settled COMPLETED", "mismatched")

    def test_a_store_that_is_away(self, heard, monkeypatch):
        place = make_place(heard)
        place.fail(monkeypatch, "claim")
        place.run()
        told(place, "store_failed")
        assert isinstance(heard.events[0][2].error, StoreUnavailable)

    def test_a_store_that_is_away_while_it_is_observed(self, heard, monkeypatch):
        place = make_place(heard, idempotency_mode="observe")
        place.fail(monkeypatch, "claim")
        place.run()
        told(place, "store_failed")
        assert heard.events[0][2].observed

    def test_a_settle_that_cannot_be_had(self, heard, monkeypatch):
        place = make_place(heard, idempotency_lease=0.1)
        place.fail(monkeypatch, "settle")
        place.run()
        told(place, "claimed PROCESSING", "settle_failed")

    def test_what_crashed_too_often_is_failed_and_then_answers(self, heard):
        place = make_place(heard, idempotency_max_crashes=0)
        place.store.interrupt(KEY, token=place.claim().token)
        place.run()
        told(place, "settled FAILED", "replayed")

    @pytest.mark.parametrize("outcome", ["conflicted", "replayed", "mismatched"])
    def test_what_would_have_been_is_a_warning(self, heard, outcome):
        place = make_place(heard, idempotency_mode="observe")
        record = place.claim(fingerprint=b"other" if outcome == "mismatched" else None)
        if outcome == "replayed":
            place.store.settle(
                SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=9000)
            )
        place.run()
        assert heard.names == [outcome]
        assert heard.events[0][2].observed
        (line,) = heard.lines
        assert line.levelname == "WARNING"
        assert "observed: task t (shop.charge) runs, and would have" in line.getMessage()


class TestPublisher:
    def place(self, heard: Heard) -> Place:
        return make_place(heard, idempotency_publish_once=True)

    def test_a_key_that_is_published_once(self, heard):
        place = self.place(heard)
        first = place.task.delay("o")
        assert place.task.delay("o").id == first.id
        told(place, "reserved QUEUED", "replayed")
        assert heard.events[1][2].record.task_id == first.id

    def test_a_key_that_is_done(self, heard):
        place = self.place(heard)
        place.store.settle(
            SettleRequest(record=place.claim(), state=State.COMPLETED, value=None, keep_ms=9000)
        )
        assert place.task.delay("o").id == "other"
        told(place, "replayed")

    def test_other_arguments(self, heard):
        place = self.place(heard)
        place.task.delay("o")
        with pytest.raises(FingerprintMismatch):
            place.task.delay("o", amount=2)
        told(place, "reserved QUEUED", "mismatched")

    def test_a_store_that_is_away(self, heard, monkeypatch):
        place = self.place(heard)
        place.fail(monkeypatch, "reserve")
        place.task.delay("o")
        told(place, "store_failed")
        assert "is published unreserved: away" in heard.lines[0].getMessage()


class TestSweep:
    def test_a_stale_claim(self, heard):
        place = make_place(heard)
        place.claim()
        assert place.sweep()["interrupted"] == 1
        told(place, "interrupted INTERRUPTED", "swept")
        assert heard.events[0][2].reason == "the lease ran out"

    def test_a_stale_claim_that_is_failed(self, heard):
        place = make_place(heard)
        place.claim(on_stale="fail")
        assert place.sweep()["failed"] == 1
        told(place, "interrupted INTERRUPTED", "settled FAILED", "swept")
        assert isinstance(heard.events[1][2].error, ProcessingTimedOut)

    def test_a_run_that_completed_just_before_it_was_to_be_failed(self, heard, monkeypatch):
        """The store takes the settle of its token, and keeps the first end: it did not fail."""
        place = make_place(heard)
        record = place.claim(on_stale="fail")
        swept = place.store.sweep

        def late(**how: Any) -> Any:
            found = swept(**how)
            place.store.settle(
                SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=90_000)
            )
            return found

        monkeypatch.setattr(place.store, "sweep", late)
        assert place.sweep()["failed"] == 0
        told(place, "interrupted INTERRUPTED", "swept")

    def test_a_stale_claim_that_is_queued_again(self, heard):
        place = make_place(heard)
        place.claim(on_stale="requeue", message=place.message())
        assert place.sweep()["requeued"] == 1
        told(place, "requeued QUEUED", "swept")

    def test_a_message_that_cannot_be_published(self, heard):
        place = make_place(heard)
        place.claim(on_stale="requeue", message=b"application/x-python-serialize\nbinary\nno")
        assert place.sweep()["requeued"] == 0
        told(place, "store_failed", "swept")
        assert heard.events[0][2].error is not None

    def test_a_namespace_that_no_task_has_is_named_as_it_is(self, heard):
        place = make_place(heard)
        claim(place.store, Identity(namespace="gone", key="o"))
        place.sweep()
        event = heard.events[0][2]
        assert (event.task, event.identity.namespace) == ("gone", "gone")


class TestOperator:
    @pytest.mark.parametrize(
        ("operation", "done", "expected"),
        [
            ("release", "released", "released"),
            ("forget", "forgot", "forgotten"),
            ("fail", "failed", "settled FAILED"),
            ("requeue", "requeued", "requeued QUEUED"),
            ("complete", "completed", "settled COMPLETED"),
        ],
    )
    def test_an_operation(self, heard, operation, done, expected):
        place = make_place(heard)
        value = place.task.idempotency_definition().codec.dump_given(17)
        about = {"value": value} if operation == "complete" else {}
        place.operate(operation, place.claim(message=place.message()), **about)
        told(place, expected, who="ada")
        assert heard.events[0][2].reason == "it is\nstuck"
        line = heard.lines[0].getMessage()
        assert line == rf"idempotency: ada {done} billing key o: it is\nstuck"
        if operation == "fail":
            assert isinstance(heard.events[0][2].error, FailedByOperator)


class TestMainProcess:
    def test_the_claim_of_a_child_that_is_gone(self, heard):
        place = make_place(heard)
        with subprocess.Popen([sys.executable, "-c", ""]) as child:
            child.wait()
        place.claim(worker_name(child.pid))
        looked = threading.Event()
        interrupt_claim(place.task, KEY, "other", child.pid, looked)
        assert looked.is_set()
        told(place, "interrupted INTERRUPTED")
        assert heard.events[0][2].reason == f"its process {child.pid} is gone"


def test_there_is_one_signal_for_each_documented_outcome():
    names = {name for name, each in vars(signals).items() if isinstance(each, Signal)}
    assert names == signals.OUTCOMES.keys() == documented().keys()


def test_an_event_is_frozen_and_has_no_dict():
    event = signals.Event(task="shop.charge")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.task = "another"  # type: ignore[misc]
    assert not hasattr(event, "__dict__")


@pytest.mark.parametrize("raises", [False, True], ids=["", "whatever a receiver raises"])
def test_a_line_has_fields_for_machines_which_name_no_argument_and_no_result(heard, raises):
    def explode(**_: object) -> None:
        raise RuntimeError("a receiver's own trouble")

    place = make_place(heard)
    with ExitStack() as stack:
        for signal in signals.OUTCOMES.values() if raises else ():
            signal.connect(explode, weak=False)
            stack.callback(signal.disconnect, explode)
        for task_id in ("one", "two"):
            place.task.apply(("o",), task_id=task_id).get()
    assert heard.names == ["claimed", "settled", "replayed"]
    fields = [
        {name: value for name, value in vars(line).items() if name.startswith("idempotency_")}
        for line in heard.lines
    ]
    same = {
        "idempotency_task": TASK,
        "idempotency_namespace": NAMESPACE,
        "idempotency_key": "o",
        "idempotency_scope": "",
        "idempotency_attempt": 1,
        "idempotency_crashes": 0,
        "idempotency_who": worker_name(os.getpid()),
    }
    one, two = same | {"idempotency_task_id": "one"}, same | {"idempotency_task_id": "two"}
    assert fields == [
        one | {"idempotency_outcome": "claimed", "idempotency_state": "PROCESSING"},
        one | {"idempotency_outcome": "settled", "idempotency_state": "COMPLETED"},
        two | {"idempotency_outcome": "replayed", "idempotency_first_task_id": "one"},
    ]


def test_a_line_keeps_its_template_and_has_the_facts_as_arguments(heard):
    """An error tracker groups by the template: who mutes one issue must not mute the next CRITICAL."""
    place = make_place(heard)
    for key in ("a-7", "b-8"):
        for task_id in ("one", "two"):
            with suppress(KeyError):
                place.task.apply((key, raising(KeyError())), task_id=task_id)
    first, second = heard.lines[:3], heard.lines[3:]
    assert [each.msg for each in first] == [each.msg for each in second]
    assert len({each.msg for each in first}) == 3
    assert all("billing key b-8" in each.args for each in second)


def test_a_failure_is_an_error_in_the_log_once_and_its_replays_are_not(heard, caplog, monkeypatch):
    place = make_place(heard)
    monkeypatch.setattr(place.task, "run", Mock(side_effect=KeyError))
    caplog.set_level("INFO", "celery.app.trace")
    for _ in range(3):
        assert deliver(place.task, "o").state == "FAILURE"
    levels = [each.levelname for each in caplog.records if each.name == "celery.app.trace"]
    assert levels == ["ERROR", "INFO", "INFO"]
