"""What a guard does around a view of any kind, under ``ATOMIC_REQUESTS`` and without, seen by a client of Django's."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, connections
from django.db.transaction import non_atomic_requests
from django.http import HttpResponse, JsonResponse
from django.middleware.clickjacking import XFrameOptionsMiddleware
from django.middleware.security import SecurityMiddleware
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django.utils.decorators import method_decorator
from django.views import View
from django.views.decorators.clickjacking import xframe_options_exempt
from django.views.decorators.gzip import gzip_page

from celery_idempotent.celery.operations import OperationRequest, Outcome, operate
from celery_idempotent.django.http import idempotent_view
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.http.status import describe
from celery_idempotent.protocol.run import Body, Run
from celery_idempotent.records import Claimed, ClaimRequest, Identity, SettleRequest, State
from celery_idempotent.stores import get_store
from tests.http.kinds import HANDLERS, kinds
from tests.http.sites import new_key
from tests.sql.databases import atomic_requests, execute, rows
from tests.support.waiting import wait_for

ALIAS = "atomic_requests"
KINDS = ("plain", "coroutine", "dispatch", *HANDLERS)

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


@pytest.fixture
def twice(factory: Any) -> Callable[..., tuple[Any, Any]]:
    """Send one request two times."""

    def twice(view: Any, **headers: str) -> tuple[Any, Any]:
        headers["HTTP_IDEMPOTENCY_KEY"] = new_key()
        return view(factory.post("/", **headers)), view(factory.post("/", **headers))

    return twice


Twice = Callable[..., tuple[Any, Any]]


def written(text: str) -> int:
    return len(rows(ALIAS, "SELECT 1 FROM note WHERE text = %s", (text,)))


def write(request: Any) -> tuple[int, dict[str, int]]:
    """Write what the query says, and do what it says."""
    execute(ALIAS, "INSERT INTO note VALUES (%s)", (request.GET["note"],))
    if "raise" in request.GET:
        raise ValueError("after writing")
    depth = len(connections[ALIAS].atomic_blocks)
    return int(request.GET.get("status", "200")), {"transactions": depth}


class Site:
    """Views of every kind with the same options, and a client."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.module = ModuleType("guarded_urls")
        self.module.__dict__["urlpatterns"] = _patterns(options)
        self._client = Client(raise_request_exception=False, HTTP_HOST="localhost")

    def ask(
        self, path: str, key: str | None = None, *, method: str = "POST", body: Any = None
    ) -> Any:
        headers: dict[str, Any] = {} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}
        with override_settings(ROOT_URLCONF=self.module):
            return self._client.generic(
                method, path, json.dumps(body or {}), content_type="application/json", **headers
            )


def _patterns(options: dict[str, Any]) -> list[Any]:
    guarded = idempotent_view(**options)
    views = kinds(guarded, write)

    @guarded
    @non_atomic_requests(ALIAS)
    def spared(request: Any) -> Any:
        status, told = write(request)
        return JsonResponse(told, status=status)

    def within(view: Any) -> Any:
        """Have Django open its transaction around the view: it looks at this function alone."""
        return lambda request: view(request)

    return [
        *(path(name, view) for name, view in views.items() if name not in HANDLERS),
        path("spared", spared),
        *(path(f"inside/{name}", within(views[name])) for name in HANDLERS),
        *(path(name, non_atomic_requests(ALIAS)(views[name])) for name in HANDLERS),
    ]


# ATOMIC_REQUESTS -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("method", "given"),
    [("POST", {"required": False}), ("GET", {})],
    ids=["no key", "safe method"],
)
def test_a_request_that_is_not_guarded_is_a_transaction_too(
    options: dict[str, Any], kind: str, method: str, given: dict[str, Any]
) -> None:
    site, note = Site(options | given), new_key()
    assert site.ask(f"/{kind}?note={note}&raise", method=method).status_code == 500
    assert written(note) == 0
    answer = site.ask(f"/{kind}?note={note}", method=method)
    assert (answer.status_code, answer.json()) == (200, {"transactions": 1})
    assert written(note) == 1
    # As in Django without a guard.
    assert site.ask(f"/{kind}?note={note}&status=400", method=method).status_code == 400
    assert written(note) == 2


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_request_wrote_is_undone_where_its_key_is_given_back(
    options: dict[str, Any], kind: str
) -> None:
    site, note, key = Site(options), new_key(), new_key()
    for end, status in (("raise", 500), ("status=400", 400), ("status=503", 503)):
        assert site.ask(f"/{kind}?note={note}&{end}", key).status_code == status
        assert written(note) == 0
    for _ in range(2):
        answer = site.ask(f"/{kind}?note={note}&status=402", key)
        assert (answer.status_code, answer.json()) == (402, {"transactions": 1})
    assert written(note) == 1


@pytest.mark.parametrize("kind", [each for each in HANDLERS if "async" not in each])
def test_a_handler_inside_a_transaction_is_refused(
    options: dict[str, Any], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    site, note = Site(options), new_key()
    assert site.ask(f"/inside/{kind}?note={note}", new_key()).status_code == 500
    assert written(note) == 0
    assert "non_atomic_requests" in caplog.text


def test_a_view_without_transactions_of_its_requests_keeps_what_it_wrote(
    options: dict[str, Any],
) -> None:
    site, note = Site({**options, "required": False}), new_key()
    for number, key in enumerate((None, new_key()), start=1):
        assert site.ask(f"/spared?note={note}&raise", key).status_code == 500
        assert written(note) == number


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


def test_while_the_store_is_down_only_what_is_known_is_said(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store is lost before the view, which may have run before, or with the answer of the COMMIT."""

    def lost(run: Run, body: Body) -> None:
        body()
        run.store_failed(StoreUnavailable("nobody knows whether it is committed"))

    def down(run: Run, _: Body) -> None:
        run.store_failed(StoreUnavailable("it is down"))

    site, note, key = Site(options), new_key(), new_key()
    assert site.ask(f"/plain?note={note}", key).status_code == 200
    for execute_, said in (
        (lost, "It is not known yet whether it was carried out."),
        (
            down,
            "Whether an earlier request with this key was carried out is not known; this one was not.",
        ),
    ):
        monkeypatch.setattr("celery_idempotent.http.guard.execute", execute_)
        answer = site.ask(f"/plain?note={note}", key)
        assert (answer.status_code, answer.json()["code"]) == (503, "store_unavailable")
        assert answer.json()["detail"].startswith(said)


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
        with pytest.raises(ImproperlyConfigured, match="Decorate the coroutine function"):
            view(factory.post("/", HTTP_IDEMPOTENCY_KEY=key)).send(None)


@pytest.mark.parametrize("key", ["k", None])
def test_a_view_that_returns_no_response_is_told_of(
    options: dict[str, Any], factory: Any, key: str | None
) -> None:
    @idempotent_view(**options, required=False)
    def plain_data(request: Any) -> Any:
        return {"paid": 17}

    headers = {} if key is None else {"HTTP_IDEMPOTENCY_KEY": key}
    with pytest.raises(ImproperlyConfigured, match="plain_data returned a value of type dict"):
        plain_data(factory.post("/", **headers))


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


def test_a_compressed_answer_is_repeated_as_one(options: dict[str, Any], twice: Twice) -> None:
    @idempotent_view(**options)
    @gzip_page
    def long(request: Any) -> Any:
        return HttpResponse("long " * 1000)

    first, again = twice(long, HTTP_ACCEPT_ENCODING="gzip")
    assert gzip.decompress(first.content) == b"long " * 1000
    assert (again.content, again["Idempotent-Replayed"]) == (first.content, "true")
    assert again["Content-Encoding"] == first["Content-Encoding"] == "gzip"


# A replay is as safe and as open as its first answer -----------------------------------------------------------------

SAFE = {
    "Content-Security-Policy": "default-src 'none'",
    "X-Frame-Options": "SAMEORIGIN",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "unsafe-none",
    "Permissions-Policy": "camera=()",
    "X-Content-Type-Options": "nosniff",
    "Access-Control-Allow-Origin": "https://shop.example",
    "Access-Control-Allow-Credentials": "true",
    "Access-Control-Expose-Headers": "Location, Retry-After, Idempotent-Replayed",
    "Clear-Site-Data": '"cookies"',
    "Pragma": "no-cache",
    "Expires": "0",
}


def through_middleware(view: Any) -> Any:
    """Have a view answer as in Django, with the middleware that sets these headers where they are not set."""
    within: Any = XFrameOptionsMiddleware(view)
    return SecurityMiddleware(within)


def test_a_replay_has_the_headers_of_security_and_of_other_origins(
    options: dict[str, Any], twice: Twice
) -> None:
    @idempotent_view(**options)
    def strict(request: Any) -> Any:
        return HttpResponse("<p>", headers=SAFE)

    first, again = twice(through_middleware(strict))
    assert again["Idempotent-Replayed"] == "true"
    for answer in (first, again):
        assert {name: answer.get(name) for name in SAFE} == SAFE


def test_a_page_that_may_be_framed_may_be_framed_again(
    options: dict[str, Any], twice: Twice
) -> None:
    view = xframe_options_exempt(idempotent_view(**options)(lambda _: HttpResponse("<p>")))
    answers = twice(through_middleware(view))
    assert ["X-Frame-Options" in answer for answer in answers] == [False, False]


@pytest.mark.parametrize("name", ["xframe_options_exempt", "_csp_config", "_csp_replace_ro"])
def test_an_answer_that_would_be_less_safe_again_is_not_repeated(
    options: dict[str, Any], twice: Twice, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    @idempotent_view(**options)
    def view(request: Any) -> Any:
        answer: Any = HttpResponse("<p>")
        setattr(answer, name, {"default-src": ["'none'"]})
        return answer

    first, again = twice(view)
    assert (first.status_code, again.status_code) == (200, 410)
    assert name in caplog.text
