"""The ASGI and the WSGI middleware, each called as a server calls it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from typing import Any
from unittest.mock import AsyncMock

import pytest
from celery import Celery

from celery_idempotent import current_claim
from celery_idempotent.asgi import IdempotencyMiddleware, bearer_scope
from celery_idempotent.errors import InvalidOption
from celery_idempotent.signals import Event, replayed
from celery_idempotent.stores import open_store
from celery_idempotent.wsgi import IdempotencyMiddleware as OfWSGI
from tests.http.callers import (
    DOORS,
    KINDS,
    Answer,
    AsgiClient,
    Call,
    Client,
    WsgiClient,
    open_client,
)
from tests.http.sites import new_key
from tests.support.servers import EmbeddedRedis
from tests.support.waiting import wait_for

JSON = [("Content-Type", "application/json")]

#: That of the view.
app = Celery("middleware", broker="memory://", set_as_current=False)
app.conf.idempotency_store = "memory://"


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Shop:
    """An application that counts its runs; ``answer`` is what it answers next."""

    def __init__(self) -> None:
        self.runs: list[Call] = []
        self.answer: Callable[[int], Any] = lambda run: (201, JSON, [b'{"run": %d}' % run])

    def __call__(self, call: Call) -> Any:
        self.runs.append(call)
        return self.answer(len(self.runs))


@pytest.fixture
def shop() -> Shop:
    return Shop()


@pytest.fixture
def client(kind: str, shop: Shop) -> Any:
    return open_client(kind, shop)


def test_a_repetition_gets_the_first_response_byte_for_byte(client: Any, shop: Shop) -> None:
    headers = [*JSON, ("Link", "</a>"), ("Link", "</b>"), ("Vary", "A"), ("Set-Cookie", "s=1")]
    headers += [("X-Own", "é"), ("Date", "of the first")]
    # No standard names the status.
    shop.answer = lambda _: (299, headers, [b"\x00", b"", b"\xff\r\n\r\n"])
    key = new_key()
    first, again = client.ask(key, b"{}"), client.ask(key, b"{}")
    assert (first.status, first.body, first.of("set-cookie")) == (299, b"\x00\xff\r\n\r\n", ["s=1"])
    assert (again.status, again.body) == (299, first.body)
    assert again.headers == [
        *((name.lower(), value) for name, value in headers[:4]),
        ("x-own", "é"),
        ("idempotent-replayed", "true"),
        ("content-length", "6"),
    ]
    assert not first.replayed
    (run,) = shop.runs
    assert (run.method, run.path, run.body) == ("POST", "/pay", b"{}")


def test_the_application_gets_the_body_and_its_claim(client: Any, shop: Shop) -> None:
    def answer(_: int) -> Any:
        claim = current_claim()
        assert claim is not None
        return 200, JSON, [json.dumps([claim.key, claim.scope]).encode()]

    shop.answer = answer
    key = new_key()
    found, scope = client.ask(key, b"x" * 100_000).json
    assert found == key
    assert "ann" not in scope
    assert shop.runs[0].body == b"x" * 100_000


@pytest.mark.parametrize("credentials", ["", "Bearer", "Bearer  ", "Basic YTpi"])
def test_without_credentials_nothing_runs(client: Any, shop: Shop, credentials: str) -> None:
    assert client.ask(new_key(), Authorization=credentials).code == (403, "caller_unknown")
    assert shop.runs == []


def test_other_methods_and_paths_run_unguarded(kind: str, shop: Shop) -> None:
    client = open_client(kind, shop, paths=("/pay",), methods=["POST"])
    for asked in ({"method": "GET"}, {"method": "PATCH"}, {"path": "/other"}):
        assert client.ask(None, **asked).status == 201
    assert client.ask(None, path="/pay/17").status == 400
    assert len(shop.runs) == 3


@pytest.mark.parametrize(
    ("root", "path", "guarded", "status"),
    [
        ("/apì", "/apì/pay", "/pay", 400),
        ("/apì", "/apì/pay", "/apì/pay", 400),
        ("/apì", "/apì/other", "/pay", 201),
        ("/apì", "/pay", "/pay", 400),  # servers of ASGI leave the prefix out, or not
        ("/apì", "/other", "/pay", 201),
        ("", "/apì/pay", "/pay", 201),
    ],
)
def test_paths_match_with_and_without_the_prefix_of_the_application(
    kind: str, shop: Shop, root: str, path: str, guarded: str, status: int
) -> None:
    client = open_client(kind, shop, paths=(guarded,))
    client.root = root
    assert client.ask(None, path=path).status == status


def test_a_claim_that_the_frozen_store_executes_late_holds_its_key_for_a_moment(
    kind: str, shop: Shop, private_redis: EmbeddedRedis
) -> None:
    store = open_store(f"{private_redis.url()}?socket_timeout=1")
    client = open_client(kind, shop, store=store)
    assert client.ask(new_key()).status == 201  # a new connection would not get as far as the claim
    key = new_key()
    private_redis.freeze()
    assert client.ask(key).code == (503, "store_unavailable")
    private_redis.thaw()
    done = wait_for(lambda: (a := client.ask(key)).status != 409 and a, 10, "the key to be free")
    assert (done.status, done.replayed, len(shop.runs)) == (201, False, 2)


UNSENDABLE = [
    *((200, f"OK{text}", "X-Own", "a") for text in ("\r\nSet-Cookie: sid=evil", "\x7f")),
    *((200, "OK", f"X-Own{text}", "a") for text in ("\r\nX", ":", " ", "é")),
    *((200, "OK", "X-Own", f"a{text}b") for text in ("\r\nSet-Cookie: sid=evil", "\n", "\x00")),
    (200, "OK", "Set-Cookie", "sid=1\r\nX-Own: 1"),
    (199, "OK", "X-Own", "a"),
    (20, "OK", "X-Own", "a"),
]


@pytest.mark.parametrize(("status", "reason", "name", "value"), UNSENDABLE)
def test_a_response_that_no_server_sends_is_an_error_and_frees_the_key(
    kind: str, status: int, reason: str, name: str, value: str
) -> None:
    def of_wsgi(_: Any, start_response: Any) -> Any:
        code, text, headers = answers.pop(0)
        start_response(f"{code} {text}", headers)
        return [b""]

    async def of_asgi(_: Any, __: Any, send: Any) -> None:
        code, _, headers = answers.pop(0)
        raw = [(key.encode("latin-1"), value.encode("latin-1")) for key, value in headers]
        await send({"type": "http.response.start", "status": code, "headers": raw})
        await send({"type": "http.response.body"})

    if kind == "asgi" and reason != "OK":
        pytest.skip("ASGI has no reason")
    answers = [(status, reason, [*JSON, (name, value)]), (201, "Created", JSON)]
    client: Client = asgi(of_asgi) if kind == "asgi" else wsgi(of_wsgi)
    key = new_key()
    with pytest.raises(ValueError, match="No server can send"):
        client.ask(key)
    assert [client.ask(key).replayed for _ in range(2)] == [False, True]


# Sizes ---------------------------------------------------------------------------------------------------------------


def test_asgi_refuses_two_keys_and_a_declared_size_over_the_limit_unread(shop: Shop) -> None:
    client, send = open_client("asgi", shop, max_request_bytes=10), AsyncMock()
    scope = client.scope("POST", "/pay", {**client.headers, "Idempotency-Key": '"a'})
    joined = {**scope, "headers": [*scope["headers"], (b"idempotency-key", b'b"')]}
    assert asyncio.run(client.serve(joined, [])).code == (400, "idempotency_key_invalid")
    large = [(b"idempotency-key", b"a"), *scope["headers"][:-1], (b"content-length", b"11")]
    asyncio.run(client.app({**scope, "headers": large}, None, send))
    assert send.await_args_list[0].args[0]["status"] == 413


def test_a_response_over_the_limit_is_passed_on_as_it_comes(kind: str, shop: Shop) -> None:
    client = open_client(kind, shop, max_response_bytes=10)
    sent: list[int] = []

    def parts() -> Iterator[bytes]:
        for _ in range(5):
            yield b"12345"
            sent.append(len(b"".join(client.sent)))

    shop.answer = lambda _: (200, JSON, parts())
    key = new_key()
    answer = client.ask(key)
    assert (answer.status, answer.body) == (200, b"12345" * 5)
    assert sent == [0, 0, 0, 15, 20], "the last part is sent when the record is settled"
    told = client.ask(key)
    assert told.code == (410, "result_not_kept")
    assert "more than 10 bytes" in told.json["detail"]
    assert len(shop.runs) == 1


def test_a_client_that_hangs_up_does_not_stop_the_run(kind: str, shop: Shop) -> None:
    client = open_client(kind, shop, max_response_bytes=10)
    client.gone = True
    shop.answer = lambda run: (200, JSON, [b"%d" % run] * (20 if run == 1 else 5))
    large, small = new_key(), new_key()
    for key in (large, small):
        client.ask(key)
    client.gone = False
    assert client.ask(large).code == (410, "result_not_kept")
    assert client.ask(small).body == b"22222"
    assert len(shop.runs) == 2


# Options -------------------------------------------------------------------------------------------------------------


async def coroutine(_: Any) -> bool:
    """Whose answer nobody awaits: it would let everybody in."""
    return False


#: Of all doors, and of the middleware alone.
BAD: list[tuple[dict[str, Any], str]] = [
    ({"leese": 3}, "did you mean lease?"),
    ({"nonsense": 3}, "known are"),
    ({"lease": "long"}, "seconds or a timedelta"),
    ({"lease": 0}, "at least 0.1 seconds"),
    ({"required": "yes"}, "True or False"),
    ({"unstored": [500]}, "below 500"),
    ({"scope": 5}, "function of the request"),
    ({"authorize": "no.such.module"}, "No module named"),
    ({"authorize": 5}, "authorize"),
    ({"authorize": coroutine}, "authorize"),
    ({"max_request_bytes": -1}, "0 or a positive"),
    ({"docs_url": 5}, "string"),
    *(({"key": key}, "key of") for key in (5, None, "", "X Own", "shop.keys.of")),
]
BAD_MIDDLEWARE: list[tuple[dict[str, Any], str]] = [
    ({"scope": None}, "scope of IdempotencyMiddleware"),
    ({"store": 5}, "must be a URL, a store or a Celery app"),
    ({"store": "nowhere://"}, "scheme 'nowhere'"),
    ({"atomic": True}, "needs Django"),
    ({"methods": "POST"}, "must be a sequence"),
    ({"methods": ["GET"]}, "sequence of POST, PUT"),
    ({"paths": "/"}, "must be a sequence"),
    ({"paths": ()}, "must be a sequence"),
    ({"paths": ["/pay", "orders"]}, 'which begin with "/"'),
    ({"name": ""}, "short string"),
]


@pytest.mark.usefixtures("django")
@pytest.mark.parametrize("door", DOORS)
def test_a_bad_option_is_refused_where_it_is_given(door: str, shop: Shop) -> None:
    for options, said in [*BAD, *(BAD_MIDDLEWARE if door in KINDS else [])]:
        with pytest.raises(InvalidOption, match=re.escape(said)):
            open_client(door, shop, **options)


@pytest.mark.usefixtures("django")
@pytest.mark.parametrize("door", DOORS)
def test_a_fingerprint_of_ones_own_counts_instead_of_the_body(door: str, shop: Shop) -> None:
    def amount(request: Any, body: bytes | None = None) -> Any:
        return json.loads(request.body if body is None else body)["amount"]

    client, key = open_client(door, shop, fingerprint=amount), new_key()
    assert client.ask(key, b'{"amount": 1, "at": 5}').status == 201
    assert client.ask(key, b'{"amount": 1, "at": 6}').replayed
    assert client.ask(key, b'{"amount": 2, "at": 6}').status == 422
    with pytest.raises(TypeError, match="no canonical form"):
        open_client(door, shop, fingerprint=lambda *_: object()).ask(new_key())


def test_a_function_that_reads_the_request_takes_nothing_from_the_application(shop: Shop) -> None:
    read = {"fingerprint": lambda environ, _: environ["wsgi.input"].read().decode()}
    client, key = open_client("wsgi", shop, **read), new_key()
    assert client.ask(key, b"17").status == 201
    assert client.ask(key, b"18").status == 422
    assert [call.body for call in shop.runs] == [b"17"]


def test_names_keep_two_services_in_one_store_apart(kind: str) -> None:
    def note(sender: Any, event: Event, **_: Any) -> None:
        told.append((sender, event.task, event.identity and event.identity.namespace))

    told: list[Any] = []
    store, key, names = open_store("memory://"), new_key(), ("books", "cars")
    clients = [open_client(kind, Shop(), store=store, name=name) for name in names]
    replayed.connect(note)
    try:
        for client in clients:
            assert [client.ask(key).replayed for _ in range(2)] == [False, True]
    finally:
        replayed.disconnect(note)
    assert [each[1:] for each in told] == [("books", "books"), ("cars", "cars")]


def test_the_log_says_that_a_released_key_had_a_response_that_is_not_stored(
    kind: str, shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    shop.answer = lambda _: (429, JSON, [b"{}"])
    with caplog.at_level(logging.INFO, "celery_idempotent.signals"):
        assert open_client(kind, shop).ask(new_key()).status == 429
    assert caplog.messages[-1].endswith("after ResponseNotStored")


# ASGI ----------------------------------------------------------------------------------------------------------------


def asgi(app: Any, **options: Any) -> AsgiClient:
    return AsgiClient(IdempotencyMiddleware(app, store="memory://", scope=bearer_scope, **options))


def test_what_is_no_request_passes_untouched() -> None:
    async def app(*given: Any) -> None:
        seen.extend(given)

    seen: list[Any] = []
    given = ({"type": "websocket"}, object(), object())
    asyncio.run(asgi(app).app(*given))
    assert [id(each) for each in seen] == [id(each) for each in given]


def test_the_caller_may_be_found_by_a_coroutine(shop: Shop) -> None:
    async def scope(request: Any) -> Any:
        await asyncio.sleep(0)
        return bearer_scope(request)

    client = open_client("asgi", shop, scope=scope)
    key = new_key()
    assert [client.ask(key).replayed for _ in range(2)] == [False, True]
    assert client.ask(key, Authorization="").code == (403, "caller_unknown")


def test_an_application_that_ends_without_a_response_releases_the_key() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        runs.append(current_claim())
        if len(runs) == 1:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            return
        with pytest.raises(RuntimeError, match="without a status"):
            await send({"type": "http.response.body", "body": b"early"})
        await send({"type": "http.response.start", "status": 204})
        await send({"type": "http.response.body"})

    runs: list[Any] = []
    client, key = asgi(app), new_key()
    with pytest.raises(RuntimeError, match="before its response was complete"):
        client.ask(key)
    assert [client.ask(key).replayed for _ in range(2)] == [False, True]


def test_what_fails_after_the_response_is_for_the_server_and_changes_no_record() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert scope["extensions"] == {"tls": {}}
        assert (await receive())["body"] == b"whole body"
        gone = asyncio.ensure_future(receive())
        await asyncio.sleep(0.01)
        assert not gone.done(), "it still works for its client"
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})
        assert current_claim() is None
        assert await gone == {"type": "http.disconnect"}
        raise ZeroDivisionError

    client, key = asgi(app), new_key()
    with pytest.raises(ZeroDivisionError):
        client.ask(key, b"whole body")
    assert client.sent == [b"", b"done"]
    assert client.ask(key, b"whole body").body == b"done"


def test_more_requests_than_threads_wait_for_one() -> None:
    async def app(_: Any, __: Any, send: Any) -> None:
        running.append("begun")
        for _ in range(20):
            await asyncio.sleep(0)
        running.append("done")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    running: list[str] = []
    client = asgi(app, threads=1)
    answers = asyncio.run(burst(client, [new_key() for _ in range(3)]))
    assert [each.replayed for each in answers] == [False] * 3
    assert running == ["begun", "done"] * 3


def test_half_a_body_without_a_length_reaches_no_application(shop: Shop) -> None:
    client, key = open_client("asgi", shop), new_key()
    scope = client.scope("POST", "/pay", {**client.headers, "Idempotency-Key": key})
    answer = asyncio.run(client.serve(scope, [b"half"], ends=False))
    assert answer.code == (400, "body_incomplete")
    assert shop.runs == []


@pytest.mark.parametrize(("last", "status"), [(b"", 201), (b"y", 413)])
def test_a_body_in_chunks_is_read_beyond_its_limit(shop: Shop, last: bytes, status: int) -> None:
    client = open_client("asgi", shop, max_request_bytes=10)
    scope = client.scope("POST", "/pay", {**client.headers, "Idempotency-Key": new_key()})
    assert asyncio.run(client.serve(scope, [b"x" * 10, last])).status == status
    assert [call.body for call in shop.runs] == [b"x" * 10] * (status == 201)


async def burst(client: AsgiClient, keys: list[str]) -> list[Answer]:
    headers = [{**client.headers, "Idempotency-Key": key} for key in keys]
    scopes = [client.scope("POST", "/pay", each) for each in headers]
    return await asyncio.gather(*(client.serve(scope, [b""]) for scope in scopes))


def test_a_repetition_that_waits_does_not_stop_the_loop() -> None:
    async def app(scope: Any, _: Any, send: Any) -> None:
        scope["route"] = "/pay"
        while len(asked) < 3:
            await asyncio.sleep(0.001)
        await asyncio.sleep(2)  # two leases
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body"})

    async def around(scope: Any, receive: Any, send: Any) -> None:
        asked.append(scope)
        await inner(scope, receive, send)

    asked: list[Any] = []
    inner = asgi(app, wait=30, lease=1).app
    answers = asyncio.run(burst(AsgiClient(around), [new_key()] * 3))
    assert sorted(each.replayed for each in answers) == [False, True, True]
    assert [each.get("route") for each in asked].count("/pay") == 1


# WSGI ----------------------------------------------------------------------------------------------------------------


def wsgi(app: Any, **options: Any) -> WsgiClient:
    return WsgiClient(OfWSGI(app, store="memory://", scope=bearer_scope, **options))


def test_what_an_application_writes_is_part_of_its_response() -> None:
    def app(_: Any, start_response: Any) -> Any:
        start_response("500 Not Yet", [])(b"written, ")
        with pytest.raises(RuntimeError, match="twice"):
            start_response("200 OK", [])
        try:
            raise ValueError
        except ValueError:
            start_response("409 Of Mine", [("Content-Type", "a/b")], sys.exc_info())
        return Closing([b"returned"], lambda: closed.append(b"".join(client.sent)))

    closed: list[bytes] = []
    client, key = wsgi(app), new_key()
    first, again = client.ask(key), client.ask(key)
    assert (first.status, first.body) == (409, b"written, returned")
    assert first.headers == [("content-type", "a/b")]
    assert (again.status, again.body, again.replayed) == (409, b"written, returned", True)
    assert closed == [first.body], "it is closed when it is sent"


class Closing(list[bytes]):
    def __init__(self, parts: Iterable[bytes], note: Callable[[], None]) -> None:
        super().__init__(parts)
        self.note = note

    def close(self) -> None:
        assert current_claim() is None
        self.note()


def test_an_application_that_fails_halfway_is_closed_and_releases_the_key() -> None:
    class Failing(Closing):
        def __iter__(self) -> Iterator[bytes]:
            yield b"half"
            raise ZeroDivisionError

    def app(_: Any, start_response: Any) -> Any:
        if closed:
            return []
        start_response("200 OK", [])
        return Failing([], lambda: closed.append("closed"))

    closed: list[str] = []
    client, key = wsgi(app), new_key()
    with pytest.raises(ZeroDivisionError):
        client.ask(key)
    assert closed == ["closed"]
    with pytest.raises(RuntimeError, match="did not call start_response"):
        client.ask(key)


@pytest.mark.parametrize(("terminated", "status"), [(True, 201), (False, 411)])
def test_a_chunked_body_is_read_where_the_server_ends_it(
    shop: Shop, terminated: bool, status: int
) -> None:
    client = open_client("wsgi", shop)
    environ = {
        "REQUEST_METHOD": "POST",
        "SCRIPT_NAME": "/mounted",
        "PATH_INFO": "/\xc3\xa9",
        "QUERY_STRING": "",
        "HTTP_IDEMPOTENCY_KEY": new_key(),
        "HTTP_AUTHORIZATION": "Bearer ann",
        "HTTP_TRANSFER_ENCODING": "chunked",
        "wsgi.input_terminated": terminated,
        "wsgi.input": BytesIO(b"x" * 100_000),
    }
    assert client.serve(environ).status == status
    assert [len(run.body) for run in shop.runs] == [100_000] * terminated
