"""Who lost an object does not get the answer about it: ``authorize`` is asked before every replay, and for no run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from django.core.management import call_command
from django.http import HttpResponse, JsonResponse
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from celery_idempotent.django.http import idempotent_view
from celery_idempotent.django.http.responses import status
from tests.http.kinds import kinds
from tests.http.sites import new_key
from tests.sql import databases

app = Celery("authorize", broker="memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"


@pytest.fixture(scope="module", autouse=True)
def _django(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with databases.ready(tmp_path_factory.mktemp("authorize")):
        call_command("migrate", "auth", verbosity=0)
        with override_settings(CELERY_IDEMPOTENT_APP=app):
            yield


@pytest.fixture
def factory() -> Any:
    return RequestFactory()


OPTIONS: dict[str, Any] = {"scope": lambda _: "caller"}


def private(request: Any, pk: int) -> tuple[int, Any]:
    return 200, {"private": pk}


def ask(kind: str, authorize: Any, key: str) -> Any:
    from types import ModuleType

    view = kinds(idempotent_view(**OPTIONS, authorize=authorize), private)[kind]
    module = ModuleType("authorized_urls")
    module.__dict__["urlpatterns"] = [path("<int:pk>/", view)]
    client = Client(raise_request_exception=False, HTTP_HOST="localhost")
    with override_settings(ROOT_URLCONF=module):
        return client.post("/5/", headers={"Idempotency-Key": key})


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

    key = new_key()
    for answer in answers:
        assert ask(kind, authorize, key).status_code == (answers[answer] if asked else 200)
        if not asked:
            assert ask(kind, authorize, key).status_code == 200
    assert asked == [("POST", 5)] * len(answers)
    unawaited.close()


def test_the_status_resource_cannot_ask_and_tells_no_more_than_the_status(factory: Any) -> None:
    @idempotent_view(**OPTIONS)
    def view(request: Any) -> Any:
        return JsonResponse({"private": 1}, status=201, headers={"Location": "/private/"})

    key = new_key()
    assert view(factory.post("/", HTTP_IDEMPOTENCY_KEY=key)).status_code == 201
    with override_settings(IDEMPOTENCY_HTTP=OPTIONS):
        shown: Any = status(factory.get("/"), "http", key)
    told = json.loads(shown.content)
    assert (told["state"], told["result"]) == ("COMPLETED", {"status": 201})
