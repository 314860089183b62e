"""A request that is too large is 413 at every door, and nothing that was begun for it stays."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from celery import Celery
from django.test import Client, RequestFactory, override_settings
from django.urls import path

from celery_idempotent.django.http import enqueue, idempotent_view, keyed_view
from tests.http.kinds import kinds
from tests.http.sites import new_key
from tests.sql.databases import ready

FORM = "application/x-www-form-urlencoded"
KINDS = ("plain", "coroutine", "rest-function")

app = Celery("limits", broker="memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"


@pytest.fixture(scope="module", autouse=True)
def _django(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with ready(tmp_path_factory.mktemp("limits")):
        yield


def parts(count: int, *, file: bool) -> bytes:
    name = '; filename="a.txt"' if file else ""
    lines = [
        f'--x\r\nContent-Disposition: form-data; name="a"{name}\r\n\r\n1\r\n' for _ in range(count)
    ]
    return "".join([*lines, "--x--\r\n"]).encode()


#: What is over which limit.
TOO_LARGE = {
    "ours": (FORM, b"a=" + b"1" * 30_000),
    "Django's of bytes": (FORM, b"a=" + b"1" * 15_000),
    "Django's of fields": (FORM, b"&".join([b"a=1"] * 101)),
    "Django's of parts": ("multipart/form-data; boundary=x", parts(103, file=False)),
    "Django's of files": ("multipart/form-data; boundary=x", parts(11, file=True)),
}
LIMITS = {
    "DATA_UPLOAD_MAX_MEMORY_SIZE": 10_000,
    "DATA_UPLOAD_MAX_NUMBER_FIELDS": 100,
    "DATA_UPLOAD_MAX_NUMBER_FILES": 10,
    "IDEMPOTENCY_HTTP": {"max_request_bytes": 20_000},
    "CELERY_IDEMPOTENT_APP": app,
}


def read(request: Any) -> tuple[int, Any]:
    return 200, {"a": request.POST["a"]}


def ask(view: Any, kind: str, body: bytes, key: str) -> Any:
    module = ModuleType("limited_urls")
    module.__dict__["urlpatterns"] = [path("", view)]
    client = Client(raise_request_exception=False, HTTP_HOST="localhost")
    with override_settings(ROOT_URLCONF=module, **LIMITS):
        return client.generic("POST", "/", body, content_type=kind, HTTP_IDEMPOTENCY_KEY=key)


@pytest.mark.parametrize("limit", TOO_LARGE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("decorator", [idempotent_view, keyed_view])
def test_a_request_over_a_limit_is_413_and_leaves_nothing(
    decorator: Any, kind: str, limit: str
) -> None:
    if decorator is keyed_view and limit not in {"ours", "Django's of bytes"}:
        pytest.skip("the view itself parses the form")
    view, key = kinds(decorator(scope=lambda _: "caller"), read)[kind], new_key()
    answer = ask(view, *TOO_LARGE[limit], key)
    assert (answer.status_code, answer.headers["Content-Type"]) == (413, "application/problem+json")
    assert answer.json()["code"] == "request_too_large"
    small = ask(view, FORM, b"a=1", key)
    assert (small.status_code, small.json()) == (200, {"a": "1"}), "the key is free"


def test_enqueue_itself_refuses_what_nobody_has_looked_at() -> None:
    from celery_idempotent import IdempotentTask

    @app.task(base=IdempotentTask, name="limits.task", shared=False)
    def task() -> None:
        """Never comes to be published."""

    request = RequestFactory().generic(
        "POST", "/", b"1" * 30_000, "text/plain", HTTP_IDEMPOTENCY_KEY="k"
    )
    with override_settings(**LIMITS):
        assert enqueue(request, task, scope="caller").status_code == 413
