"""What a guard does around a view of any kind, seen by a client of Django's."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections
from django.db.transaction import non_atomic_requests
from django.http import HttpResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View

from celery_idempotent.celery.operations import OperationRequest, Outcome, operate
from celery_idempotent.django.http import idempotent_view
from celery_idempotent.http.status import describe
from celery_idempotent.records import Claimed, ClaimRequest, Identity, SettleRequest, State
from celery_idempotent.stores import get_store
from tests.http.kinds import kinds
from tests.http.sites import new_key
from tests.sql.databases import atomic_requests, execute, rows
from tests.support.waiting import wait_for

ALIAS = "atomic_requests"
app = Celery("guards", broker="memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"


@pytest.fixture(scope="module", autouse=True)
def _django(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with (
        atomic_requests(ALIAS, tmp_path_factory.mktemp("guards")),
        override_settings(CELERY_IDEMPOTENT_APP=app),
    ):
        yield


@pytest.fixture
def options() -> dict[str, Any]:
    """What the views are guarded with."""
    return {"scope": lambda _: "caller"}


@pytest.fixture
def factory() -> Any:
    return RequestFactory()


def written(text: str) -> int:
    return len(rows(ALIAS, "SELECT 1 FROM note WHERE text = %s", (text,)))


def write(request: Any) -> tuple[int, dict[str, int]]:
    """Write what the query says."""
    execute(ALIAS, "INSERT INTO note VALUES (%s)", (request.GET["note"],))
    return 200, {}


class Site:
    """Views of every kind with the same options, and a client: on ``/inside`` Django has a transaction around them."""

    def __init__(self, options: dict[str, Any]) -> None:
        views = kinds(idempotent_view(**options), write)
        self.module = ModuleType("guarded_urls")
        self.module.__dict__["urlpatterns"] = [
            *(path(name, non_atomic_requests(ALIAS)(view)) for name, view in views.items()),
            *(
                path(f"inside/{name}", lambda request, view=view: view(request))
                for name, view in views.items()
            ),
        ]
        self._client = Client(raise_request_exception=False, HTTP_HOST="localhost")

    def ask(self, path: str, key: str) -> Any:
        with override_settings(ROOT_URLCONF=self.module):
            return self._client.post(path, headers={"Idempotency-Key": key})


# Transactions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["plain", "handler", "rest"])
def test_a_view_inside_a_transaction_is_refused(
    options: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    site, note, key = Site(options), new_key(), new_key()
    assert site.ask(f"/inside/{kind}?note={note}", key).status_code == 500
    assert written(note) == 0
    assert "non_atomic_requests" in caplog.text
    assert site.ask(f"/{kind}?note={note}", key).status_code == 200


# Records -------------------------------------------------------------------------------------------------------------


def new_identity() -> Identity:
    return Identity(namespace="http", scope="caller", key=new_key())


def test_what_an_operator_failed_is_told_as_that(options: dict[str, Any]) -> None:
    site, note, identity = Site(options), new_key(), new_identity()
    store = get_store(app)
    claimed = store.claim(
        ClaimRequest(identity=identity, attempt=os.urandom(8), lease_ms=1, keep_ms=60_000)
    )
    assert isinstance(claimed, Claimed)

    def fail() -> bool:
        token = claimed.record.token
        done = operate(app, identity, OperationRequest("fail"), token=token, state=State.PROCESSING)
        return done is Outcome.DONE

    wait_for(fail)
    answer = site.ask(f"/plain?note={note}", identity.key)
    assert (answer.status_code, answer.json()["code"]) == (500, "failed_by_operator")
    assert "operator" in answer.json()["detail"]
    assert answer.json()["retryable"] is False
    assert written(note) == 0
    record = store.get(identity)
    assert record is not None
    told = describe(record, key=identity.key, task=None)
    assert told["error"]["code"] == "failed_by_operator"
    assert told["error"]["type"] == "FailedByOperator"
    assert told["retryable"] is False


def test_what_collided_after_its_view_ran_does_not_run_again_on_the_same_request(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its files are read by then, and its user may have changed."""
    monkeypatch.setattr("celery_idempotent.http.guard.execute", lambda _, body: (body(), body())[1])
    site, note = Site(options), new_key()
    answer = site.ask(f"/plain?note={note}", new_key())
    assert (answer.status_code, answer.json()["code"]) == (503, "rolled_back")
    assert answer.json()["detail"].startswith("The database rolled it back")
    assert written(note) == 1


def test_a_record_without_a_response_is_told_as_that(options: dict[str, Any]) -> None:
    site, note, identity = Site(options), new_key(), new_identity()
    asked: dict[str, Any] = {"attempt": os.urandom(8), "lease_ms": 60_000, "keep_ms": 60_000}
    store = get_store(app)
    claimed = store.claim(ClaimRequest(identity=identity, **asked))
    assert isinstance(claimed, Claimed)
    end = SettleRequest(record=claimed.record, state=State.COMPLETED, value=None, keep_ms=60_000)
    assert store.settle(end)
    answer = site.ask(f"/plain?note={note}", identity.key)
    assert (answer.status_code, answer.json()["code"]) == (410, "result_not_kept")
    assert written(note) == 0


# Tenants -------------------------------------------------------------------------------------------------------------


def test_users_of_two_tenants_with_one_primary_key_are_two_callers(
    factory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """django-tenants has users per tenant, who are numbered from 1 in each schema."""
    from django.contrib.auth.models import User

    sold: list[str] = []

    @idempotent_view
    def sell(request: Any) -> HttpResponse:
        sold.append(connection.schema_name)  # type: ignore[attr-defined]
        return HttpResponse(sold[-1], status=201)

    key = new_key()
    for number, tenant in enumerate(("a", "b", "a", "b")):
        monkeypatch.setattr(type(connections["default"]), "schema_name", tenant, raising=False)
        request = factory.post("/", HTTP_IDEMPOTENCY_KEY=key)
        request.user = User(pk=1)
        answer = sell(request)
        assert (answer.status_code, answer.content.decode()) == (201, tenant)
        assert answer.get("Idempotent-Replayed") == ("true" if number > 1 else None)
    assert sold == ["a", "b"]


# Views that cannot be guarded, and views with habits -----------------------------------------------------------------


def test_a_request_that_middleware_hands_to_its_view_once_more_is_guarded_then_too(
    options: dict[str, Any], factory: Any
) -> None:
    runs: list[int] = []

    @idempotent_view(**options)
    def view(_: Any) -> HttpResponse:
        runs.append(1)
        if len(runs) == 1:
            raise ConnectionError
        return HttpResponse("done")

    request = factory.post("/", HTTP_IDEMPOTENCY_KEY=new_key())
    with pytest.raises(ConnectionError):
        view(request)
    assert view(request).content == b"done"
    assert view(request)["Idempotent-Replayed"] == "true"
    assert len(runs) == 2


def test_a_coroutine_that_nobody_awaits_is_told_of(options: dict[str, Any], factory: Any) -> None:
    @method_decorator(idempotent_view(**options), name="dispatch")
    class Late(View):
        async def post(self, request: Any) -> Any:
            return HttpResponse(request.idempotency_key)

    view: Any = Late.as_view()
    key = new_key()
    for _ in range(2):  # and the key is free
        with pytest.raises(ImproperlyConfigured, match="a coroutine function instead"):
            view(factory.post("/", HTTP_IDEMPOTENCY_KEY=key)).send(None)


def test_a_view_that_returns_no_response_is_told_of(options: dict[str, Any], factory: Any) -> None:
    @idempotent_view(**options)
    def plain_data(request: Any) -> Any:
        return {"paid": 17}

    with pytest.raises(ImproperlyConfigured, match="plain_data returned a value of type dict"):
        plain_data(factory.post("/", HTTP_IDEMPOTENCY_KEY=new_key()))


def test_an_answer_is_finished_once_and_a_replay_never(
    options: dict[str, Any], factory: Any
) -> None:
    """A project's own ``finalize_response()`` reads and wraps the data, which a replay has no more."""
    from rest_framework.response import Response
    from rest_framework.views import APIView

    finished = []

    class Wrapped(APIView):
        authentication_classes = ()
        permission_classes = ()

        @idempotent_view(**options)
        def post(self, request: Any) -> Any:
            return Response({"a": 1})

        def finalize_response(self, request: Any, response: Any, *args: Any, **kwargs: Any) -> Any:
            finished.append(response)
            wrapped = Response({"data": response.data}, status=response.status_code)
            return super().finalize_response(request, wrapped, *args, **kwargs)

    view, key = Wrapped.as_view(), new_key()
    answers = [view(factory.post(path, HTTP_IDEMPOTENCY_KEY=key)) for path in ("/", "/", "/other")]
    assert [answer.status_code for answer in answers] == [200, 200, 422]
    assert [answer.content for answer in answers[:2]] == [b'{"data":{"a":1}}'] * 2
    assert len(finished) == 1
