"""Each outcome of a request is told once, as in a worker: one event, one count, one line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from celery import Celery
from django.db import transaction
from django.http import HttpResponse
from django.test import RequestFactory, override_settings

from celery_idempotent import IdempotentTask, get_store
from celery_idempotent.django.http import enqueue, idempotent_view
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import State, Stored
from celery_idempotent.signals import worker_name
from celery_idempotent.stores.memory import MemoryStore
from tests.support.records import settle_key
from tests.support.telling import Heard, assert_told, listening

pytestmark = pytest.mark.usefixtures("django")

app = Celery("told", broker="memory://", backend="cache+memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"


@pytest.fixture
def heard() -> Iterator[Heard]:
    with listening() as heard:
        yield heard


@pytest.fixture
def charge() -> Iterator[Any]:
    shop = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    shop.conf.idempotency_store = "memory://"

    @shop.task(
        base=IdempotentTask, name="shop.charge", shared=False, idempotency_namespace="billing"
    )
    def charge(amount: int) -> int:
        return amount

    yield charge
    shop.close()


def queue(charge: Any, amount: int = 1, **options: Any) -> int:
    request = RequestFactory().post("/", headers={"Idempotency-Key": "k"})
    for name, value in options.items():
        setattr(request, name, value)
    return enqueue(request, charge, kwargs={"amount": amount}, scope="ann").status_code


def settle(charge: Any, state: Any, value: Stored | None = None) -> None:
    """Hold the key as a worker does, and settle it."""
    identity = charge.idempotency_definition().identifier.identity("k", "ann")
    settle_key(get_store(charge.app), identity, state, value)


def told(heard: Heard, *expected: str) -> None:
    who = worker_name(os.getpid())
    assert_told(heard, *expected, task="shop.charge", namespace="billing", who=who)


def failed(charge: Any) -> None:
    """End as a run whose error may pass."""
    error = charge.idempotency_definition().codec.dump_error(ConnectionError("the bank is away"))
    settle(charge, State.FAILED, error)


BEFORE: dict[str, Callable[[Any], Any]] = {
    "queued": queue,
    "completed": partial(settle, state=State.COMPLETED),
    "failed for good": partial(settle, state=State.FAILED),
    "failed": failed,
}


@pytest.mark.parametrize(
    ("before", "amount", "status", "expected"),
    [
        ("queued", 1, 202, ["reserved QUEUED", "replayed"]),
        ("queued", 2, 422, ["reserved QUEUED", "mismatched"]),
        ("completed", 1, 200, ["replayed"]),
        ("failed for good", 1, 500, ["replayed"]),
        ("failed", 1, 202, ["forgotten", "reserved QUEUED"]),
    ],
)
def test_each_repetition(
    charge: Any, heard: Heard, before: str, amount: int, status: int, expected: list[str]
) -> None:
    BEFORE[before](charge)
    assert queue(charge, amount=amount) == status
    told(heard, *expected)


def test_a_store_that_is_away(charge: Any, heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    def reserve(*_: object, **__: object) -> None:
        raise StoreUnavailable("away")

    monkeypatch.setattr("celery_idempotent.http.enqueueing.REQUEST_RETRY_SECONDS", 0)
    monkeypatch.setattr(MemoryStore, "reserve", reserve)
    assert queue(charge) == 503
    assert heard.names == ["store_failed"]
    assert heard.counted == {("shop.charge", "store_failed"): 1}
    assert isinstance(heard.events[0][2].error, StoreUnavailable)
    assert [line.levelname for line in heard.lines] == ["WARNING"]


@pytest.mark.parametrize("commits", [True, False], ids=["committed", "rolled back"])
def test_a_reservation_of_a_transaction_is_told_once_it_is_committed(
    charge: Any, heard: Heard, commits: bool
) -> None:
    with suppress(ZeroDivisionError), transaction.atomic():
        assert queue(charge) == 202
        assert heard.names == []
        if not commits:
            raise ZeroDivisionError
    told(heard, *["reserved QUEUED"] * commits)


def test_a_view_that_is_asked_twice(heard: Heard) -> None:
    @idempotent_view(scope=lambda _: "ann")
    def pay(_: Any) -> HttpResponse:
        return HttpResponse("paid")

    for _ in range(2):
        request = RequestFactory().post("/", headers={"Idempotency-Key": "view"})
        with override_settings(CELERY_IDEMPOTENT_APP=app):
            assert pay(request).status_code == 200
    assert_told(
        heard,
        "claimed PROCESSING",
        "settled COMPLETED",
        "replayed",
        task="http",  # which lists their records
        namespace="http",
        who=worker_name(os.getpid()),
    )
