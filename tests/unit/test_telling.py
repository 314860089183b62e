"""Each outcome is told once wherever it comes from: one event, one count, one line, all with the same facts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import pytest
from celery import Celery
from celery.utils.dispatch import Signal

from celery_idempotent import FingerprintMismatch, IdempotentTask, current_claim, signals
from celery_idempotent.celery import operations, sweep
from celery_idempotent.celery.worker import interrupt_claim
from celery_idempotent.errors import FailedByOperator, StoreUnavailable
from celery_idempotent.records import Identity, Record, SettleRequest, State
from celery_idempotent.signals import worker_name
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.records import claim_key
from tests.support.telling import Heard, assert_told, documented

TASK, NAMESPACE = "shop.charge", "billing"
KEY = Identity(namespace=NAMESPACE, key="o")


class Place(NamedTuple):
    """Where an outcome may come from; what happens there returns it."""

    app: Celery
    task: Any
    store: MemoryStore
    clock: FakeClock
    patch: pytest.MonkeyPatch

    def claim(self, worker: str = "host:1", **more: Any) -> Place:
        """Hold the key for another process."""
        claim_key(self.store, KEY, lease_ms=5000, worker=worker, **more)
        return self

    def record(self) -> Record:
        found = self.store.get(KEY)
        assert found is not None
        return found

    def complete(self, record: Record | None = None) -> Place:
        """Settle the key for another process."""
        record = record or self.claim().record()
        self.store.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=90_000)
        )
        return self

    def crash(self) -> Place:
        self.store.interrupt(KEY, token=self.claim().record().token)
        return self

    def run(self, then: Callable[[], object] = lambda: None, **more: Any) -> Place:
        with suppress(Exception):
            self.task.apply(("o", then), more, task_id="t").get()
        return self

    def lose(self) -> Place:
        """Run, lose the key meanwhile, and fail."""

        def then() -> None:
            self.clock.advance(6000)
            self.complete()
            raise ValueError

        return self.run(then)

    def publish(self, **more: Any) -> Place:
        with suppress(FingerprintMismatch):
            self.task.apply_async(("o",), more)
        return self

    def sweep(self) -> Place:
        self.clock.advance(6000)
        sweep.sweep(self.app)
        return self

    def complete_while_swept(self) -> Place:
        """The store takes the settle of its token, and keeps the first end: it did not fail."""
        record, swept = self.claim(on_stale="fail").record(), self.store.sweep

        def late(**how: Any) -> Any:
            found = swept(**how)
            self.complete(record)
            return found

        self.patch.setattr(self.store, "sweep", late)
        return self.sweep()

    def lose_child(self) -> Place:
        """Have the main process of a worker find that a child is gone."""
        with subprocess.Popen([sys.executable, "-c", ""]) as child:
            child.wait()
        interrupt_claim(self.claim(worker_name(child.pid)).task, KEY, "other", child.pid)
        return self

    def message(self) -> bytes:
        signature = self.task.signature(("o",), task_id="other")
        message: bytes = self.task.idempotency_definition().codec.dump_message(signature)
        return message

    def fail(self, verb: str) -> Place:
        def fails(*_: object, **__: object) -> None:
            raise StoreUnavailable("away")

        self.patch.setattr("celery_idempotent.protocol.run.CLAIM_SECONDS", 0)
        self.patch.setattr(MemoryStore, verb, fails)
        return self


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Place]:
    def make(**options: Any) -> Place:
        clock = FakeClock()
        store = MemoryStore(clock)
        app = Celery("told", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.update(idempotency_store=store, task_eager_propagates=True)
        options = {"lease": 5, "key": "order_id", "namespace": NAMESPACE, **options}
        options |= {"permanent_errors": (KeyError,), "fingerprint": ("amount",)}
        given = {f"idempotency_{name}": value for name, value in options.items()}

        @app.task(name=TASK, base=IdempotentTask, shared=False, **given)
        def charge(
            order_id: str, then: Callable[[], object] = lambda: None, amount: int = 1
        ) -> object:
            return then()

        charge.idempotency_policy  # noqa: B018  finalizes the app
        return Place(app, app.tasks[TASK], store, clock, monkeypatch)

    return make


def raising(error: BaseException) -> Callable[[], object]:
    def then() -> object:
        raise error

    return then


def stepping() -> None:
    running = current_claim()
    assert running is not None
    running.step("first", lambda: 1)
    raise ValueError


RUN, END, STALE = "claimed PROCESSING", "settled COMPLETED", "interrupted INTERRUPTED"
UNREADABLE = b"application/x-python-serialize\nbinary\nno"
#: What is told of what happens: outcomes with their states, each with words of its line.
TOLD: list[tuple[str, Callable[[Any], Place]]] = [
    (f"{RUN}, {END}", lambda make: make().run()),
    (f"{RUN}, settled FAILED", lambda make: make().run(raising(KeyError()))),
    (f"{RUN}, released", lambda make: make().run(raising(ValueError()))),
    (f"{RUN}, released INTERRUPTED", lambda make: make().run(stepping)),
    (f"{RUN}, lease_lost: is dropped, replayed", lambda make: make().lose()),
    (f"{RUN}, {END}, replayed: gets the stored result", lambda make: make().run().run()),
    ("conflicted: which other@host:1 holds", lambda make: make().claim().run()),
    (f"{RUN}, {END}, mismatched: with other arg", lambda make: make().run().run(amount=2)),
    ("store_failed: away", lambda make: make().fail("claim").run()),
    ("store_failed: away", lambda make: make(mode="observe").fail("claim").run()),
    (f"{RUN}, settle_failed: away", lambda make: make(lease=0.1).fail("settle").run()),
    ("settled FAILED: without a run, replayed", lambda make: make(max_crashes=0).crash().run()),
    ("reserved QUEUED, replayed", lambda make: make(publish_once=True).publish().publish()),
    ("replayed: task other", lambda make: make(publish_once=True).complete().publish()),
    (
        "reserved QUEUED, mismatched",
        lambda make: make(publish_once=True).publish().publish(amount=2),
    ),
    (
        "store_failed: unreserved: away",
        lambda make: make(publish_once=True).fail("reserve").publish(),
    ),
    (f"{STALE}: the lease ran out, swept", lambda make: make().claim().sweep()),
    (
        f"{STALE}, settled FAILED: did not come back, swept: failed 1",
        lambda make: make().claim(on_stale="fail").sweep(),
    ),
    (f"{STALE}, swept: failed 0", lambda make: make().complete_while_swept()),
    (
        "requeued QUEUED, swept: requeued 1",
        lambda make: (p := make()).claim(on_stale="requeue", message=p.message()).sweep(),
    ),
    (
        "store_failed: could not be requeued, swept: requeued 0",
        lambda make: make().claim(on_stale="requeue", message=UNREADABLE).sweep(),
    ),
    (f"{STALE}: is gone", lambda make: make().lose_child()),
]
#: The outcomes that are told with an error.
WITH_ERRORS = {
    "settled FAILED",
    "released",
    "released INTERRUPTED",
    "store_failed",
    "settle_failed",
}


def told(place: Place, heard: Heard, *expected: str, who: str = "") -> None:
    who = who or worker_name(os.getpid())
    assert_told(heard, *expected, task=TASK, namespace=NAMESPACE, who=who)
    for name, sender, _ in heard.events:
        assert sender is (None if name == "swept" else place.app.tasks[TASK])


@pytest.mark.parametrize(("text", "happens"), TOLD, ids=[text for text, _ in TOLD])
def test_an_outcome_is_told_once(make, heard, text, happens):
    place = happens(make)
    outcomes = [each.partition(": ") for each in text.split(", ")]
    told(place, heard, *(outcome for outcome, _, _ in outcomes))
    for (outcome, _, words), (_, _, event), line in zip(
        outcomes, heard.events, heard.lines, strict=True
    ):
        assert words in line.getMessage()
        assert (event.error is not None) is (outcome in WITH_ERRORS)
        assert event.observed is (place.task.idempotency_policy.mode == "observe")


@pytest.mark.parametrize("outcome", ["conflicted", "replayed", "mismatched"])
def test_what_would_have_been_is_a_warning(make, heard, outcome):
    place = make(mode="observe").claim(fingerprint=b"other" if outcome == "mismatched" else None)
    if outcome == "replayed":
        place.complete(place.record())
    place.run()
    assert heard.names == [outcome]
    assert heard.events[0][2].observed
    (line,) = heard.lines
    assert line.levelname == "WARNING"
    assert "observed: task t (shop.charge) runs, and would have" in line.getMessage()


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
def test_an_operation_is_told_with_who_and_why(make, heard, operation, done, expected):
    place = make()
    record = place.claim(message=place.message()).record()
    value = place.task.idempotency_definition().codec.dump_given(17)
    about: dict[str, Any] = {"who": "ada", "reason": "it is\nstuck", "force": True}
    about |= {"value": value} if operation == "complete" else {}
    request = operations.OperationRequest(operation, **about)
    seen = {"token": record.token, "state": record.state}
    assert operations.operate(place.app, KEY, request, **seen) is operations.Outcome.DONE
    told(place, heard, expected, who="ada")
    event, line = heard.events[0][2], heard.lines[0].getMessage()
    assert event.reason == "it is\nstuck"
    assert line == rf"idempotency: ada {done} billing key o: it is\nstuck"
    assert isinstance(event.error, FailedByOperator) is (operation == "fail")


def test_there_is_one_signal_for_each_documented_outcome():
    names = {name for name, each in vars(signals).items() if isinstance(each, Signal)}
    assert names == signals.OUTCOMES.keys() == documented().keys()


@pytest.mark.parametrize("raises", [False, True], ids=["", "whatever a receiver raises"])
def test_a_line_has_fields_for_machines_which_name_no_argument_and_no_result(make, heard, raises):
    def explode(**_: object) -> None:
        raise RuntimeError("a receiver's own trouble")

    place = make()
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


def test_a_line_keeps_its_template_and_has_the_facts_as_arguments(make, heard):
    """An error tracker groups by the template: who mutes one issue must not mute the next CRITICAL."""
    place = make()
    for key in ("a-7", "b-8"):
        for task_id in ("one", "two"):
            with suppress(KeyError):
                place.task.apply((key, raising(KeyError())), task_id=task_id)
    first, second = heard.lines[:3], heard.lines[3:]
    assert [each.msg for each in first] == [each.msg for each in second]
    assert len({each.msg for each in first}) == 3
    assert all("billing key b-8" in each.args for each in second)
