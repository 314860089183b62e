"""What a guard does around a view."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
from celery import Celery
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections, transaction
from django.http import HttpResponse, JsonResponse
from django.test import override_settings
from django.utils.decorators import method_decorator
from django.views import View

from celery_idempotent.celery.operations import OperationRequest, Outcome, operate
from celery_idempotent.django.http import idempotent_view, session_scope
from celery_idempotent.django.http.views import to_the_end
from celery_idempotent.http.status import describe
from celery_idempotent.records import Identity, State
from celery_idempotent.stores import get_store
from tests.http.sites import new_key
from tests.support.records import claim_key
from tests.support.waiting import wait_for

pytestmark = pytest.mark.usefixtures("django")

app = Celery("guards", broker="memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"


@pytest.fixture
def options() -> dict[str, Any]:
    """What the views are guarded with."""
    return {"scope": lambda _: "caller"}


@pytest.fixture
def pay(options: dict[str, Any], factory: Any) -> Callable[[str], Any]:
    """Ask a guarded view with a key; ``pay.runs`` are its runs."""
    runs: list[int] = []

    @idempotent_view(**options)
    def view(_: Any) -> HttpResponse:
        runs.append(1)
        return JsonResponse({})

    def pay(key: str) -> Any:
        answer = view(factory.post("/", HTTP_IDEMPOTENCY_KEY=key))
        return answer.status_code, json.loads(answer.content or b"{}")

    vars(pay)["runs"] = runs
    return pay


def test_a_view_inside_a_transaction_is_refused(pay: Any) -> None:
    with transaction.atomic(), pytest.raises(ImproperlyConfigured, match="non_atomic_requests"):
        pay(new_key())
    assert pay.runs == []


def test_a_view_inside_the_transaction_of_its_request_is_found_by_a_check(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from django.core.checks import run_checks
    from django.urls import include, path
    from rest_framework.views import APIView

    def guarded(name: str) -> Any:
        def view(_: Any) -> None:
            """Never called."""

        view.__qualname__ = name
        return idempotent_view(**options)(view)

    class Handled(APIView):
        post = guarded("post")

    free = transaction.non_atomic_requests
    views = [guarded("found"), Handled.as_view(), free(guarded("free")), free(Handled.as_view())]
    urls = (path("api/", include([path(f"{n}", each) for n, each in enumerate(views)])),)

    def found() -> list[str]:
        messages = run_checks(tags=["idempotency"])
        told = [each.msg.split()[2] for each in messages if each.id == "celery_idempotent.W028"]
        return [name.rpartition(".")[2] for name in told]

    with override_settings(ROOT_URLCONF=urls):
        assert found() == []
        monkeypatch.setitem(connections.settings["default"], "ATOMIC_REQUESTS", True)
        assert found() == ["found", "Handled"]


# Records -------------------------------------------------------------------------------------------------------------


def new_identity() -> Identity:
    return Identity(namespace="http", scope="caller", key=new_key())


def test_what_an_operator_failed_is_told_as_that(pay: Any) -> None:
    identity, store = new_identity(), get_store(app)
    token = claim_key(store, identity, lease_ms=1).token

    def fail() -> bool:
        done = operate(app, identity, OperationRequest("fail"), token=token, state=State.PROCESSING)
        return done is Outcome.DONE

    wait_for(fail)
    status, problem = pay(identity.key)
    assert (status, problem["code"], problem["retryable"]) == (500, "failed_by_operator", False)
    assert "operator" in problem["detail"]
    record = store.get(identity)
    assert record is not None
    told = describe(record, key=identity.key, task=None)
    assert told["error"]["code"] == "failed_by_operator"
    assert told["error"]["type"] == "FailedByOperator"
    assert told["retryable"] is False
    assert pay.runs == []


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


@override_settings(SESSION_ENGINE="django.contrib.sessions.backends.cache")
def test_a_visitor_whose_session_the_next_attempt_does_not_have_is_refused(factory: Any) -> None:
    """It begins with the request, or its view ends it: the new cookie is in an answer that is lost."""
    from django.contrib.sessions.middleware import SessionMiddleware

    def begin(request: Any) -> HttpResponse:
        request.session.create()
        return pay(request) if request.method == "POST" else HttpResponse()

    @idempotent_view(scope=session_scope)
    def pay(request: Any) -> HttpResponse:
        runs.append(request.session.session_key)
        request.session.cycle_key()
        return HttpResponse()

    def ask(view: Any, request: Any) -> Any:
        request.COOKIES |= cookies
        return SessionMiddleware(view)(request)

    runs: list[str] = []
    cookies: dict[str, str] = {}
    post = partial(factory.post, "/", HTTP_IDEMPOTENCY_KEY="k")
    assert [ask(view, post()).status_code for view in (pay, pay, begin)] == [403, 403, 403]
    page = ask(begin, factory.get("/"))
    cookies["sessionid"] = page.cookies["sessionid"].value
    assert [ask(pay, post()).status_code for _ in range(3)] == [200, 403, 403]
    assert runs == [cookies["sessionid"]]


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
        with pytest.raises(ImproperlyConfigured, match="the coroutine function"):
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


# A client that hangs up does not stop what it asked for ---------------------------------------------------------------

language = ContextVar("language", default="en")


def test_a_cancellation_is_passed_on_when_the_work_is_done() -> None:
    told: list[str] = []
    go = threading.Event()

    def effect() -> None:
        told.append("begun")
        assert go.wait(30)
        language.set("fr")
        told.append("done")

    async def view() -> str:
        try:
            await to_the_end(effect)
        except asyncio.CancelledError:
            told.append("cancelled")
        return language.get()

    async def main() -> list[str]:
        task = asyncio.ensure_future(view())
        while not told:
            await asyncio.sleep(0.01)
        for _ in range(2):
            task.cancel()
            await asyncio.sleep(0.01)
        go.set()
        return [await task, await view(), await view()]

    assert asyncio.run(main()) == ["fr"] * 3
    assert told == ["begun", "done", "cancelled", *["begun", "done"] * 2]
