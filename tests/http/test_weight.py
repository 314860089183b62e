"""A guard against getting slower, as tests/unit/test_weight.py is: how many functions a request has us call."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.http import JsonResponse
from django.test import RequestFactory, override_settings

from celery_idempotent import signals
from celery_idempotent.django.http import idempotent_view
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.stores import open_store
from tests.http.sites import new_key
from tests.support.admin import make_app
from tests.support.weight import calls

#: So many calls each may take; a little more than they take on any Python that we support. Lower them when you can.
#: Five of the first request look for headers that no server sends, before its key is settled.
CEILINGS = {"first request": 198, "repetition": 156}


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
