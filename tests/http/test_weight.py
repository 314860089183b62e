"""What a request costs: the functions of ours that it has called, and what it asks of its store."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from django.db import transaction
from django.http import HttpResponse, JsonResponse
from django.test import RequestFactory, override_settings

from celery_idempotent import signals
from celery_idempotent.django import user_scope
from celery_idempotent.django.http import enqueue, idempotent_view, keyed_view
from celery_idempotent.django.http.responses import status
from celery_idempotent.keys.rules import canonical
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.stores import open_store
from tests.http.sites import new_key
from tests.sql import databases
from tests.stores.shifted import CountingLink
from tests.support.admin import TASK, claim, identity, make_app, settle
from tests.support.paths import ROOT
from tests.support.weight import calls, statements

#: So many calls each may take; a little more than they take on any Python that we support. Lower them when you can.
CEILINGS = {"first request": 185, "repetition": 150}


@pytest.fixture
def send(redis_url: str, prefix: str) -> Iterator[Callable[[str], Callable[[], Any]]]:
    """Return what makes a request with a key, to be sent by a call."""
    store = open_store(f"{redis_url}?prefix={prefix}")
    with override_settings(CELERY_IDEMPOTENT_APP=make_app(store)):
        yield _sender()
    store.close()


def _sender() -> Callable[[str], Callable[[], Any]]:
    factory = RequestFactory()
    answer = {"paid": 17}
    view = idempotent_view(scope=lambda _: "acct_1")(lambda _: JsonResponse(answer, status=201))

    def made(key: str) -> Callable[[], Any]:
        request = factory.post(
            "/pay/",
            {"amount": 17, "currency": "EUR"},
            content_type="application/json",
            HTTP_IDEMPOTENCY_KEY=key,
        )
        return lambda: view(request)

    return made


@pytest.mark.usefixtures("django")
@pytest.mark.parametrize("kind", CEILINGS)
def test_a_request_takes_no_more_calls_than_before(
    send: Callable[[str], Callable[[], Any]], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Earlier tests may have installed metrics, or left a silent store to the heartbeat.
    for signal in (signals.claimed, signals.settled, signals.replayed):
        monkeypatch.setattr(signal, "receivers", [])
    heartbeat._given_up.clear()
    key = new_key()
    send(key)()

    def once() -> Callable[[], Any]:
        return send(key if kind == "repetition" else new_key())

    for _ in range(3):
        assert once()().status_code == 201
    # Now and then a collection of garbage, or the heartbeat of an earlier test, has one or two in between.
    count = min(calls(once()) for _ in range(5))
    assert 0.7 * CEILINGS[kind] < count <= CEILINGS[kind]


@dataclass(frozen=True)
class Counts:
    """How often each was asked."""

    statements: int = 0
    trips: int = 0


#: The columns of that table: statements and round trips.
COLUMNS = ("redis", "sql", "hybrid")


def stated() -> dict[str, dict[str, Counts]]:
    """Return what the page says, by what is done and store."""
    found = {}
    _, _, section = (ROOT / "docs/http.md").read_text().partition("\n## What it costs\n")
    for line in section.partition("\n## ")[0].splitlines():
        what, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if len(cells) == len(COLUMNS) and any(cell[0].isdigit() for cell in cells):
            numbers = [[int(number) for number in cell.split("+")] for cell in cells]
            (redis,), (sql,), hybrid = numbers
            counts = (Counts(0, redis), Counts(sql, 0), Counts(*hybrid))
            found[what] = dict(zip(COLUMNS, counts, strict=True))
    return found


@pytest.fixture(scope="module")
def alias(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with databases.fresh("postgresql", tmp_path_factory.mktemp("bounds"), "bounds"):
        yield "bounds"


CALLER = SimpleNamespace(pk=1, is_authenticated=True)


class Desk:
    """Asks views of an app on one store, and counts."""

    def __init__(self, store: Any, link: CountingLink | None, alias: str | None) -> None:
        self.app = make_app(store)
        self.store, self.alias = store, alias
        self._link = link
        self._factory = RequestFactory()

    def _request(self, method: str, key: str) -> Any:
        request = getattr(self._factory, method)("/pay/", {"a": "1"}, HTTP_IDEMPOTENCY_KEY=key)
        request.user = CALLER
        return request

    def view(self, key: str) -> bool:
        view = idempotent_view(lambda _: HttpResponse("paid", status=201))
        answer = view(self._request("post", key))
        assert answer.status_code == 201, answer.content
        return bool(answer.get("Idempotent-Replayed") == "true")

    def enqueue(self, key: str) -> bool:
        task = self.app.tasks[TASK]
        using = self.alias or "default"
        send = lambda request: enqueue(request, task, (key,), using=using)  # noqa: E731
        within = transaction.atomic(using=self.alias) if self.alias else contextlib.nullcontext()
        with within:
            answer = keyed_view(send)(self._request("post", key))
        assert answer.status_code in {200, 202}, answer.content
        return bool(answer.get("Idempotent-Replayed") == "true")

    def finish(self, key: str) -> None:
        """Do what a worker does."""
        scope = canonical(user_scope(CALLER), what="scope", task=TASK)
        settle(self.store, claim(self.store, identity(key, scope=scope), fingerprint=None))

    def status(self, key: str) -> None:
        assert status(self._request("get", key), TASK, key).status_code == 200

    def count(self, work: Callable[[str], Any], key: str) -> tuple[Counts, Any]:
        """What a piece of work asks, and what comes of it."""
        trips = self._link.trips if self._link else 0
        with statements() as asked:
            done = work(key)
        return Counts(len(asked), (self._link.trips if self._link else 0) - trips), done


@pytest.fixture(params=["redis", "sql", "hybrid"])
def desk(
    request: pytest.FixtureRequest, alias: str, redis_url: str, prefix: str
) -> Iterator[tuple[str, Desk]]:
    kind = request.param
    url = {
        "redis": f"{redis_url}?prefix={prefix}",
        "sql": f"django://{alias}",
        "hybrid": f"hybrid+{redis_url}?prefix={prefix}&socket_timeout=5&truth={alias}",
    }[kind]
    store: Any = open_store(url)
    link = None
    if kind != "sql":
        target = store if kind == "redis" else store.cache
        link = target._link = CountingLink(target._link)
    store.supports_counting = False  # which the heartbeat would do in between
    made = Desk(store, link, None if kind == "redis" else alias)
    with override_settings(CELERY_IDEMPOTENT_APP=made.app):
        yield kind, made
    store.close()


def test_a_request_asks_no_more_of_its_store_than_stated(desk: tuple[str, Desk]) -> None:
    kind, asking = desk
    found: dict[str, Counts] = {}
    for name, work in (("view", asking.view), ("`enqueue()`", asking.enqueue)):
        for _ in range(5):  # what is looked up once a process, or prepared once a connection
            work(new_key())
        key = new_key()
        for which in ("first request", "repetition"):
            counts, replayed = asking.count(work, key)
            assert replayed is (which == "repetition")
            found[f"{name}, {which}"] = counts
    asking.finish(key)
    found["`enqueue()`, when it is done"], _ = asking.count(asking.enqueue, key)
    found["status"], _ = asking.count(asking.status, key)
    assert found == {what: counts[kind] for what, counts in stated().items()}
