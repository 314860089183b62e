"""``enqueue`` and ``task_status`` in routes of FastAPI and Flask: records in memory, no server."""

from __future__ import annotations

import asyncio
import datetime
import decimal
import json
import threading
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NamedTuple

import fastapi
import flask
import httpx
import pytest
from celery import Celery

from celery_idempotent import IdempotentTask, State, get_store
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.http import aenqueue, enqueue, task_status
from celery_idempotent.stores.memory import MemoryStore
from tests.support.records import settle_key

#: It has what a URL must escape.
KEY = "k /..?&"


class CardError(Exception):
    """A card is declined."""


class Heard(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


Send = Callable[..., Heard]


@pytest.fixture
def charge() -> Iterator[Any]:
    app = Celery("routes", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.idempotency_store = "memory://"

    @app.task(base=IdempotentTask, shared=False, idempotency_permanent_errors=(CardError,))
    def charge(amount: int) -> int:
        return amount

    messages(charge.app)
    yield charge
    app.close()


#: What both frameworks hand to ``enqueue``.
ABOUT: dict[str, Any] = {
    "status_url": "/charges/status?key={key}",
    "error_status": {CardError: 402},
}


Header = Annotated[str | None, fastapi.Header()]


def by_fastapi(charge: Any) -> Send:
    api = fastapi.FastAPI()

    @api.post("/charges")
    async def create(
        amount: Annotated[int, fastapi.Body(embed=True)],
        idempotency_key: Header = None,
        caller: Header = None,
    ) -> fastapi.Response:
        answer = await aenqueue(charge, (amount,), key=idempotency_key, scope=caller, **ABOUT)
        return fastapi.Response(*answer)

    @api.get("/charges/status")
    def look(key: str, caller: Header = None) -> fastapi.Response:
        return fastapi.Response(*task_status(charge, key, scope=caller))

    async def ask(method: str, path: str, **about: Any) -> Heard:
        transport = httpx.ASGITransport(api)
        async with httpx.AsyncClient(transport=transport, base_url="http://shop") as client:
            found = await client.request(method, path, **about)
        return Heard(found.status_code, found.headers, found.content)

    return lambda *args, **about: asyncio.run(ask(*args, **about))


def by_flask(charge: Any) -> Send:
    api = flask.Flask(__name__)

    def header(name: str) -> str | None:
        return flask.request.headers.get(name)

    @api.post("/charges")
    def create() -> Any:
        amount, key = flask.request.get_json()["amount"], header("Idempotency-Key")
        return enqueue(charge, (amount,), key=key, scope=header("Caller"), **ABOUT)

    @api.get("/charges/status")
    def look() -> Any:
        return task_status(charge, flask.request.args["key"], scope=header("Caller"))

    client = api.test_client()

    def send(method: str, path: str, **about: Any) -> Heard:
        found = client.open(path, method=method, **about)
        return Heard(found.status_code, found.headers, found.data)

    return send


@pytest.fixture(params=[by_fastapi, by_flask])
def send(request: pytest.FixtureRequest, charge: Any) -> Send:
    return request.param(charge)  # type: ignore[no-any-return]


def post(
    send: Send, *, amount: int = 5, key: str | None = f'"{KEY}"', caller: str | None = "ann"
) -> Heard:
    given = {"Idempotency-Key": key, "Caller": caller}
    headers = {name: value for name, value in given.items() if value is not None}
    return send("POST", "/charges", json={"amount": amount}, headers=headers)


def look(send: Send, where: str, caller: str = "ann", **headers: str) -> Heard:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return send("GET", where, headers={"Caller": caller, **named})


def end(charge: Any, *, value: object = 5, error: Exception | None = None) -> None:
    """Do what a worker does."""
    definition = charge.idempotency_definition()
    identity = definition.identifier.identity(KEY, "ann")
    if error is not None:
        settle_key(
            get_store(charge.app), identity, State.FAILED, definition.codec.dump_error(error)
        )
    else:
        kept = definition.codec.dump_given(value)
        settle_key(get_store(charge.app), identity, State.COMPLETED, kept)


def messages(app: Celery) -> int:
    """Take what the broker has in the app's queue; return how many messages that were."""
    found = 0
    with app.connection_for_read() as connection:
        channel: Any = connection.channel()
        while channel.basic_get(app.conf.task_default_queue, no_ack=True):
            found += 1
    return found


def test_a_key_is_queued_once_and_its_answer_says_where_it_is(send: Send, charge: Any) -> None:
    first, second = post(send), post(send)
    assert [each.status for each in (first, second)] == [202, 202]
    assert [each.headers.get("Idempotent-Replayed") for each in (first, second)] == [None, "true"]
    assert first.headers["Location"] == second.headers["Location"] == first.json["url"]
    assert first.headers["Content-Type"] == "application/json"
    assert (first.json["key"], first.json["state"]) == (KEY, "QUEUED")
    assert int(first.headers["Retry-After"]) >= 1
    assert messages(charge.app) == 1

    end(charge)
    done = post(send)
    assert (done.status, done.json["result"]) == (200, 5)
    assert done.headers["Content-Location"] == first.headers["Location"]
    assert messages(charge.app) == 0


@pytest.mark.parametrize(
    ("about", "refused"),
    [
        ({"key": None}, (400, "idempotency_key_missing")),
        ({"key": "a b"}, (400, "idempotency_key_invalid")),
        ({"key": "x" * 300}, (400, "idempotency_key_invalid")),
        ({"caller": None}, (403, "caller_unknown")),
        ({"amount": 6}, (422, "idempotency_key_reused")),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else "",
)
def test_what_is_refused_is_a_problem_and_queues_nothing(
    send: Send, charge: Any, about: dict[str, Any], refused: tuple[int, str]
) -> None:
    post(send)
    messages(charge.app)
    answer = post(send, **about)
    assert (answer.status, answer.json["code"]) == refused
    assert answer.headers["Content-Type"] == "application/problem+json"
    assert messages(charge.app) == 0


def test_an_unknown_key_is_404_and_a_store_that_is_down_503(
    send: Send, charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def down(*_: Any) -> None:
        raise StoreUnavailable("nobody there")

    nobody = send("GET", "/charges/status?key=k", headers={})
    assert (nobody.status, nobody.json["code"]) == (403, "caller_unknown")
    for key in ("other", "x" * 300, "%00"):
        unknown = look(send, f"/charges/status?key={key}")
        assert (unknown.status, unknown.json["code"]) == (404, "unknown_key")
    monkeypatch.setattr(MemoryStore, "get", down)
    monkeypatch.setattr(MemoryStore, "reserve", down)
    monkeypatch.setattr("celery_idempotent.http.enqueueing.REQUEST_RETRY_SECONDS", 0.1)
    for answer in (look(send, "/charges/status?key=k"), post(send)):
        assert (answer.status, answer.json["code"]) == (503, "store_unavailable")
        assert int(answer.headers["Retry-After"]) >= 1
    assert messages(charge.app) == 0


# Whatever the framework -----------------------------------------------------------------------------------------------


def queue(charge: Any, **about: Any) -> Any:
    return enqueue(charge, (5,), **{"key": f'"{KEY}"', "scope": "ann", **about})


def test_results_that_json_has_no_form_for_are_strings(charge: Any) -> None:
    queue(charge)
    value = {
        "cost": decimal.Decimal("1.10"),
        "id": uuid.UUID(int=7),
        "at": datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc),
    }
    end(charge, value=value)
    for answer in (task_status(charge, KEY, scope="ann"), queue(charge)):
        assert json.loads(answer.body)["result"] == {
            "cost": "1.10",
            "id": "00000000-0000-0000-0000-000000000007",
            "at": "2026-01-02T00:00:00+00:00",
        }


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (None, None),
        ("/charges/{key}/status", "/charges/a%2Fb/status"),
    ],
)
def test_the_route_says_where_the_status_is(charge: Any, where: Any, expected: str | None) -> None:
    answer = queue(charge, key="a/b", status_url=where)
    assert answer.headers.get("Location") == json.loads(answer.body)["url"] == expected


def test_without_a_key_that_is_not_required_each_request_is_queued(charge: Any) -> None:
    answers = [queue(charge, key=None, required=False) for _ in range(2)]
    assert [answer.status for answer in answers] == [202, 202]
    assert messages(charge.app) == 2


def test_problems_link_to_the_docs_of_the_route(charge: Any) -> None:
    docs = "https://docs.example/keys"
    for answer in (
        queue(charge, key=None, docs_url=docs),
        task_status(charge, "k", scope="ann", docs_url=docs),
    ):
        assert json.loads(answer.body)["type"].startswith(f"{docs}#")
        assert docs in answer.headers["Link"]


@pytest.mark.parametrize("function", [enqueue, task_status])
def test_on_an_event_loop_it_says_what_to_await(charge: Any, function: Any) -> None:
    async def route() -> None:
        function(charge, key="k", scope="ann")

    with pytest.raises(RuntimeError, match=f"await a{function.__name__}"):
        asyncio.run(route())
    assert charge.idempotency_record("k", scope="ann") is None


def test_a_caller_that_hangs_up_does_not_stop_what_it_asked_for(
    charge: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserve, entered, gone = MemoryStore.reserve, threading.Event(), threading.Event()

    def slow(*args: Any) -> Any:
        entered.set()
        assert gone.wait(30)
        return reserve(*args)

    async def route() -> None:
        asking = asyncio.ensure_future(aenqueue(charge, (5,), key="k", scope="ann"))
        await asyncio.to_thread(entered.wait, 30)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        gone.set()

    monkeypatch.setattr(MemoryStore, "reserve", slow)
    asyncio.run(route())  # ends once its threads have
    assert messages(charge.app) == 1
