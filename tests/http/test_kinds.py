"""Views of Django of every kind: each runs once, answers twice, asks ``authorize``, and refuses what is too large."""

from __future__ import annotations

import json
from collections.abc import Callable
from io import BytesIO
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from asgiref.sync import async_to_sync, sync_to_async
from celery import Celery
from django.http import HttpResponse, JsonResponse
from django.template.response import TemplateResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path
from django.views import View

from celery_idempotent import IdempotentTask, current_claim
from celery_idempotent.django.http import enqueue, idempotent_view, keyed_view
from celery_idempotent.django.http.responses import status
from tests.http.sites import new_key

pytestmark = pytest.mark.usefixtures("django")

KINDS = (
    *("plain", "coroutine", "template", "handler", "async-handler"),
    *("rest", "rest-function", "view-set"),
)
FORM = "application/x-www-form-urlencoded"
OPTIONS: dict[str, Any] = {"scope": lambda _: "caller"}

app = Celery("kinds", broker="memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"


@app.task(base=IdempotentTask, name="limits.task", shared=False)
def task() -> None:
    """Never comes to be published."""


def ask(
    view: Any,
    key: str | None,
    body: bytes = b"",
    kind: str = FORM,
    *,
    method: str = "POST",
    **more: Any,
) -> Any:
    """Ask a view about object 5; ``more`` are what else a server says of the request."""
    module = ModuleType("urls_of_kinds")
    module.__dict__["urlpatterns"] = [path("<int:pk>/", view)]
    client: Any = Client(raise_request_exception=False, HTTP_HOST="localhost")
    if key is not None:
        more["HTTP_IDEMPOTENCY_KEY"] = key
    with override_settings(ROOT_URLCONF=module):
        return client.generic(method, "/5/", body, content_type=kind, **more)


def test_a_step_of_a_view_is_not_repeated_after_its_failure() -> None:
    def view(_: Any, **__: Any) -> HttpResponse:
        claim = current_claim()
        assert claim is not None
        claim.step("charge", lambda: charges.append(1))
        return HttpResponse(status=next(statuses))

    charges, statuses, key = list[int](), iter((503, 201)), new_key()
    guarded = idempotent_view(**OPTIONS)(view)
    assert [ask(guarded, key).status_code for _ in range(3)] == [503, 201, 201]
    assert charges == [1]


@pytest.mark.parametrize("kind", KINDS)
def test_a_view_runs_once_and_answers_twice(kind: str) -> None:
    def work(request: Any, pk: int) -> tuple[int, Any]:
        runs.append(getattr(request, "_request", request).idempotency_key)
        return 201, {"run": len(runs), "pk": pk}

    runs: list[str] = []
    view, key = kinds(idempotent_view(**OPTIONS), work)[kind], new_key()
    first, again = (ask(view, key, b"a=1") for _ in range(2))
    assert (first.status_code, json.loads(first.content)) == (201, {"run": 1, "pk": 5})
    assert (again.status_code, again.content) == (201, first.content)
    assert [each.get("Idempotent-Replayed") for each in (first, again)] == [None, "true"]
    assert again["Content-Type"] == first["Content-Type"]
    for asked, code in (((key, b"a=2"), 422), ((None, b"a=1"), 400)):
        assert ask(view, *asked).status_code == code
    assert runs == [key]


@pytest.mark.parametrize("kind", ["plain", "coroutine"])
def test_a_safe_method_passes(kind: str) -> None:
    view = kinds(
        idempotent_view(**OPTIONS), lambda request, **_: (200, {"key": request.idempotency_key})
    )
    for key in (None, new_key(), "bad key,"):
        answer = ask(view[kind], key, method="GET")
        assert (answer.status_code, json.loads(answer.content)) == (200, {"key": None})


# Authorize -----------------------------------------------------------------------------------------------------------


async def nobody() -> bool:
    return False


@pytest.mark.parametrize("kind", ["plain", "coroutine", "handler", "rest"])
def test_it_is_asked_with_the_request_and_its_url_for_replays_alone(kind: str) -> None:
    asked: list[Any] = []
    unawaited = nobody()
    answers: dict[Any, int] = {
        True: 200,
        "an object": 403,
        False: 403,
        None: 403,
        unawaited: 403,
        HttpResponse(status=418): 418,
    }

    def authorize(request: Any, pk: int) -> Any:
        asked.append((request.method, pk))
        return answer

    guarded = idempotent_view(**OPTIONS, authorize=authorize)
    view, key = kinds(guarded, lambda _, pk: (200, {"private": pk}))[kind], new_key()
    for answer in answers:
        assert ask(view, key).status_code == (answers[answer] if asked else 200)
        if not asked:
            assert ask(view, key).status_code == 200
    assert asked == [("POST", 5)] * len(answers)
    unawaited.close()


def test_the_status_resource_cannot_ask_and_tells_no_more_than_the_status() -> None:
    @idempotent_view(**OPTIONS)
    def view(request: Any) -> Any:
        return JsonResponse({"private": 1}, status=201, headers={"Location": "/private/"})

    key, factory = new_key(), RequestFactory()
    assert view(factory.post("/", HTTP_IDEMPOTENCY_KEY=key)).status_code == 201
    with override_settings(IDEMPOTENCY_HTTP=OPTIONS):
        shown: Any = status(factory.get("/"), "http", key)
    told = json.loads(shown.content)
    assert (told["state"], told["result"]) == ("COMPLETED", {"status": 201})


# Limits --------------------------------------------------------------------------------------------------------------


def parts(count: int, *, file: bool) -> bytes:
    name = '; filename="a.txt"' if file else ""
    lines = [
        f'--x\r\nContent-Disposition: form-data; name="a"{name}\r\n\r\n1\r\n' for _ in range(count)
    ]
    return "".join([*lines, "--x--\r\n"]).encode()


#: What is over which limit.
TOO_LARGE: dict[str, tuple[Any, ...]] = {
    "ours": (b"a=" + b"1" * 30_000,),
    "Django's of bytes": (b"a=" + b"1" * 15_000,),
    "Django's of fields": (b"&".join([b"a=1"] * 101),),
    "Django's of parts": (parts(103, file=False), "multipart/form-data; boundary=x"),
    "Django's of files": (parts(11, file=True), "multipart/form-data; boundary=x"),
}
LIMITS = {
    "DATA_UPLOAD_MAX_MEMORY_SIZE": 10_000,
    "DATA_UPLOAD_MAX_NUMBER_FIELDS": 100,
    "DATA_UPLOAD_MAX_NUMBER_FILES": 10,
    "IDEMPOTENCY_HTTP": {"max_request_bytes": 20_000},
}


@pytest.mark.parametrize("limit", TOO_LARGE)
@pytest.mark.parametrize("kind", ["plain", "coroutine", "rest-function"])
@pytest.mark.parametrize("decorator", [idempotent_view, keyed_view])
def test_a_request_over_a_limit_is_413_and_leaves_nothing(
    decorator: Any, kind: str, limit: str
) -> None:
    if decorator is keyed_view and limit not in {"ours", "Django's of bytes"}:
        pytest.skip("the view itself parses the form")
    guarded, key = decorator(**OPTIONS), new_key()
    view = kinds(guarded, lambda request, **_: (200, {"a": request.POST["a"]}))[kind]
    with override_settings(**LIMITS):
        answer, small = ask(view, key, *TOO_LARGE[limit]), ask(view, key, b"a=1")
    assert (answer.status_code, answer.headers["Content-Type"]) == (413, "application/problem+json")
    assert answer.json()["code"] == "request_too_large"
    assert (small.status_code, small.json()) == (200, {"a": "1"}), "the key is free"


#: What did not arrive whole, and how that is told. Another form is whole, and not what the client declared.
BROKEN: dict[str, tuple[int, str, dict[str, Any]]] = {
    "half": (400, "body_incomplete", {"CONTENT_LENGTH": "6"}),
    "in chunks": (411, "length_required", {"HTTP_TRANSFER_ENCODING": "chunked"}),
}


@pytest.mark.parametrize("case", BROKEN)
@pytest.mark.parametrize("is_read", [False, True])
@pytest.mark.parametrize("kind", ["plain", "coroutine", "rest-function"])
@pytest.mark.parametrize("decorator", [idempotent_view, keyed_view])
def test_what_did_not_arrive_whole_is_refused_and_leaves_nothing(
    decorator: Any, kind: str, is_read: bool, case: str
) -> None:
    """A form may be parsed before, as by Django's own protection against forged requests."""

    def before(request: Any, **url: Any) -> Any:
        _ = is_read and request.POST.get("csrfmiddlewaretoken")
        return (async_to_sync(view) if kind == "coroutine" else view)(request, **url)

    status, code, more = BROKEN[case]
    key = new_key()
    view = kinds(decorator(**OPTIONS), lambda request, **_: (200, {"a": request.POST["a"]}))[kind]
    read: dict[str, Any] = {"wsgi.input": BytesIO(b"a=1")}
    answer = ask(before, key, b"a=1", **more, **read)
    assert (answer.status_code, answer.json()["code"]) == (status, code)
    assert ask(view, key, b"a=1000").json() == {"a": "1000"}, "the key is free"


@pytest.mark.parametrize(
    ("status", "body", "more"),
    [
        (413, b"1" * 30_000, {}),
        *((status, b"1", more) for status, _, more in BROKEN.values()),
    ],
)
def test_enqueue_itself_refuses_what_nobody_has_looked_at(
    status: int, body: bytes, more: dict[str, Any]
) -> None:
    more = {"HTTP_IDEMPOTENCY_KEY": "k", **more, "wsgi.input": BytesIO(body)}
    request = RequestFactory().generic("POST", "/", body, "text/plain", **more)
    with override_settings(**LIMITS):
        assert enqueue(request, task, scope="caller").status_code == status


def kinds(guarded: Any, work: Callable[..., tuple[int, Any]]) -> dict[str, Any]:
    """Return a view of each kind; ``work`` is given the request and what its URL says, and returns status and data."""
    from rest_framework.decorators import (
        api_view,
        authentication_classes,
        parser_classes,
        permission_classes,
    )
    from rest_framework.parsers import FormParser, JSONParser, MultiPartParser
    from rest_framework.response import Response
    from rest_framework.views import APIView
    from rest_framework.viewsets import ViewSet

    def plain(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        return JsonResponse(told, status=status)

    async def coroutine(request: Any, **url: Any) -> Any:
        status, told = await sync_to_async(work)(request, **url)
        return JsonResponse(told, status=status)

    def responding(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        return Response(told, status=status)

    def rendered_later(request: Any, **url: Any) -> Any:
        status, told = work(request, **url)
        template: Any = SimpleNamespace(render=lambda context, _: json.dumps(context))
        return TemplateResponse(request, template, told, status=status)

    class Handled(View):
        @guarded
        def post(self, request: Any, **url: Any) -> Any:
            return plain(request, **url)

    class AsyncHandled(View):
        @guarded
        async def post(self, request: Any, **url: Any) -> Any:
            return await coroutine(request, **url)

    class Rest(APIView):
        authentication_classes = ()
        permission_classes = ()

        @guarded
        def post(self, request: Any, **url: Any) -> Any:
            return responding(request, **url)

    class Things(ViewSet):
        authentication_classes = ()
        permission_classes = ()

        @guarded
        def create(self, request: Any, **url: Any) -> Any:
            return responding(request, **url)

    @api_view(["POST"])
    @authentication_classes([])
    @permission_classes([])
    @parser_classes([FormParser, MultiPartParser, JSONParser])
    @guarded
    def rest_function(request: Any, **url: Any) -> Any:
        return responding(request, **url)

    return {
        "plain": guarded(plain),
        "coroutine": guarded(coroutine),
        "template": guarded(rendered_later),
        "handler": Handled.as_view(),
        "async-handler": AsyncHandled.as_view(),
        "rest": Rest.as_view(),
        "rest-function": rest_function,
        "view-set": Things.as_view({"post": "create"}),
    }
