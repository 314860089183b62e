"""Signals: one an outcome, each with one frozen event, and no receiver changes anything."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery
from celery.utils.dispatch import Signal

from celery_idempotent import IdempotentTask, signals
from celery_idempotent.celery import sweep
from celery_idempotent.events import worker_name
from celery_idempotent.records import Identity, State
from celery_idempotent.signals import Event
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.records import claim_key

Seen = list[tuple[str, Any, Event]]

NAMES = [name for name, each in vars(signals).items() if isinstance(each, Signal)]


@pytest.fixture(params=["noting", "raising"])
def seen(request: pytest.FixtureRequest) -> Iterator[Seen]:
    """All signals: name, sender, event; with one more receiver that raises, or without."""
    seen: Seen = []
    receivers: list[tuple[str, Callable[..., None]]] = []
    for name in NAMES:

        def note(sender: object, event: Event, name: str = name, **_: object) -> None:
            seen.append((name, sender, event))

        def explode(**_: object) -> None:
            raise RuntimeError("a receiver's own trouble")

        receivers += (
            [(name, note)] if request.param == "noting" else [(name, explode), (name, note)]
        )
    for name, receiver in receivers:
        getattr(signals, name).connect(receiver, weak=False)
    yield seen
    for name, receiver in receivers:
        getattr(signals, name).disconnect(receiver)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def store(clock: FakeClock) -> MemoryStore:
    return MemoryStore(clock)


@pytest.fixture
def app(store: MemoryStore) -> Celery:
    app = Celery("signals", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=store, task_eager_propagates=True)
    return app


@pytest.fixture
def task(app: Celery) -> Any:
    @app.task(
        name="shop.charge",
        base=IdempotentTask,
        shared=False,
        bind=True,
        idempotency_key="order_id",
        idempotency_permanent_errors=(KeyError,),
        idempotency_fingerprint=("order_id",),
        idempotency_lease=5,
    )
    def charge(self: Any, order_id: str, then: Callable[[], object] = lambda: None) -> object:
        return then()

    charge.idempotency_policy  # noqa: B018  finalizes the app
    return charge


def identity(key: str) -> Identity:
    return Identity(namespace="shop.charge", key=key)


def outcomes(seen: Seen) -> list[str]:
    return [name for name, _, _ in seen]


def test_there_is_one_for_each_outcome():
    assert (
        set(NAMES)
        == set(signals.OUTCOMES)
        == {
            "forgotten",
            "requeued",
            "reserved",
            "claimed",
            "replayed",
            "conflicted",
            "mismatched",
            "settled",
            "released",
            "interrupted",
            "lease_lost",
            "swept",
            "settle_failed",
            "store_failed",
        }
    )


def test_an_event_is_frozen_and_has_no_dict():
    event = Event(task="shop.charge")
    with pytest.raises(dataclasses.FrozenInstanceError):
        event.task = "another"  # type: ignore[misc]
    assert not hasattr(event, "__dict__")


def test_a_sweep_tells_interrupted_for_each_and_swept_once(task, app, seen, store, clock):
    for key in ("a", "b"):
        hold(store, key)
    clock.advance(60_000)
    report = sweep.sweep(app)
    assert report["interrupted"] == 2
    assert sorted(outcomes(seen)) == ["interrupted", "interrupted", "swept"]
    name, _, event = seen[-1]
    assert (name, event.task, event.count) == ("swept", sweep.SWEEP, 2)
    interrupted = {event.identity.key: event for name, _, event in seen if name == "interrupted"}
    assert set(interrupted) == {"a", "b"}
    assert interrupted["a"].record.state is State.INTERRUPTED
    assert interrupted["a"].task == "shop.charge"


def hold(store: MemoryStore, key: str) -> Any:
    return claim_key(store, identity(key), worker="another-host:1")


def test_a_line_has_fields_for_machines_which_name_no_argument_and_no_result(task, caplog):
    caplog.set_level(logging.DEBUG, "celery_idempotent.events")
    task.apply(("o",), task_id="one").get()
    task.apply(("o",), task_id="two").get()
    fields = [
        {name: value for name, value in vars(line).items() if name.startswith("idempotency_")}
        for line in caplog.records
    ]
    same = {
        "idempotency_task": "shop.charge",
        "idempotency_namespace": "shop.charge",
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
