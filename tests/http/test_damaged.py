"""Whatever stands in the store for a value: who asks for it gets an answer, soon, and never a 500."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery
from django.http import HttpResponse
from django.test import RequestFactory, override_settings

from celery_idempotent import IdempotentTask
from celery_idempotent.django.http import enqueue, idempotent_view
from celery_idempotent.django.http.responses import status
from celery_idempotent.records import Identity, State, Stored
from celery_idempotent.stores import get_store
from tests.http.sites import new_key
from tests.support.records import settle_key

app = Celery("damaged", broker="memory://", backend="cache+memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"
app.conf.accept_content = ["json", "pickle"]


class Hostile:
    """Not what it was when it was stored."""

    def __reduce__(self) -> Any:
        return _raise, ()

    def __str__(self) -> str:
        raise OSError


def _raise() -> None:
    raise OSError


@app.task(base=IdempotentTask, name="damaged.task", shared=False)
def task() -> None:
    """Never run here."""


@pytest.fixture(scope="module", autouse=True)
def _caller(django: None) -> Iterator[None]:
    with override_settings(IDEMPOTENCY_HTTP={"scope": lambda _: "caller"}):
        yield


def deep(depth: int) -> bytes:
    return b"[" * depth + b"]" * depth


#: Bodies of a result, or of an error, in JSON or not.
BODIES: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no text": b"\xff\xfe",
    "null": b"null",
    "too deep to be read": deep(100_000),
    "half of a character": rb'"\ud800"',
    "an error without a type": b'{"exc_message": "m"}',
    "an error of a type that is none": b'{"exc_type": 5, "exc_message": [1], "exc_module": 7}',
    "an error that is a list": b'{"exc_type": ["E"], "exc_module": "os"}',
    "an error that is a function": b'{"exc_type": "system", "exc_module": "os", "exc_message": "true"}',
    "an error with half of a character": rb'{"exc_type": "E\ud800", "exc_message": "\ud800", "exc_module": null}',
    "a date that is none": b'{"__type__": "datetime", "__value__": "x"}',
    "an unknown envelope": b'{"__type__": "nothing", "__value__": "x"}',
    "not a number": b"NaN",
    "a response": b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n\r\n[]",
    "a response without a status": b"HTTP/1.1\r\n\r\n",
    "a response with a status that is none": b"HTTP/1.1 9999 What\r\n\r\n",
    "a response with half a header": b"HTTP/1.1 200 OK\r\nContent-Type\r\n\r\n",
    "a response in two": b"HTTP/1.1 200 OK\r\nLocation: a\nSet-Cookie: b\r\n\r\n",
}
KINDS: dict[str, tuple[str, str]] = {
    "json": ("application/json", "utf-8"),
    "response": ("application/http", "binary"),
    "pickle": ("application/x-python-serialize", "binary"),
    "unknown": ("application/x-unknown", "x"),
}


def settle(namespace: str, state: State, value: Stored) -> str:
    """Settle a key; return it."""
    identity = Identity(namespace=namespace, scope="caller", key=new_key())
    settle_key(get_store(app), identity, state, value)
    return identity.key


def answers(namespace: str, key: str) -> dict[str, Any]:
    """Ask for the key by its status, and by sending it again."""
    factory: Any = RequestFactory()
    again = factory.post("/", HTTP_IDEMPOTENCY_KEY=key)
    return {
        "status": status(factory.get("/"), namespace, key),
        "again": enqueue(again, task)
        if namespace == "damaged.task"
        else idempotent_view(lambda _: HttpResponse("never"))(again),
    }


@pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED], ids=str)
@pytest.mark.parametrize(
    ("namespace", "kind"),
    [*(("damaged.task", kind) for kind in KINDS), ("http", "json"), ("http", "response")],
)
def test_no_stored_value_is_a_500(namespace: str, kind: str, state: State) -> None:
    content_type, content_encoding = KINDS[kind]
    for name, body in BODIES.items():
        value = Stored(content_type=content_type, content_encoding=content_encoding, body=body)
        found = answers(namespace, settle(namespace, state, value))
        failed = state is State.FAILED
        for way, answer in found.items():
            allowed = {200, 202, 410, 500} if way == "again" else {200}
            assert answer.status_code in allowed, (name, way, answer.content)
            assert (answer.status_code == 500) <= failed, (name, way)
        told = json.loads(found["status"].content)
        assert (told["state"], told["settled"]) == (state.value, True), name


def test_an_object_of_the_projects_own_is_told_as_not_kept() -> None:
    import pickle

    body = pickle.dumps(Hostile())
    value = Stored(content_type=KINDS["pickle"][0], content_encoding="binary", body=body)
    for state in (State.COMPLETED, State.FAILED):
        for answer in answers("damaged.task", settle("damaged.task", state, value)).values():
            assert answer.status_code in {200, 202, 500}
