"""What is answered when: one list of cases for all doors, each behind a server of its own.

Where a door differs from the others, the case says so, and why.
"""

from __future__ import annotations

import contextlib
import http.client
import random
import re
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from celery_idempotent.http.middleware import bearer_scope
from celery_idempotent.http.requests import http_identity
from celery_idempotent.records import Identity, State
from celery_idempotent.stores import Store, open_store
from tests.http.frameworks import DOORS, PIECES
from tests.http.sites import Answer, Web, new_key
from tests.support.paths import ROOT
from tests.support.proxy import Proxy
from tests.support.records import claim_key, settle_key
from tests.support.servers import EmbeddedRedis, embedded_redis
from tests.support.threads import all_at_once
from tests.support.waiting import wait_for
from tests.support.workers import child_environment

Headers = list[tuple[str, str]]


class Wire:
    """A connection for one request, which need not be whole."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), 60)

    def send(self, method: str, path: str, headers: Headers, body: bytes) -> None:
        lines = [
            f"{method} {path} HTTP/1.1",
            "Host: 127.0.0.1",
            *(f"{k}: {v}" for k, v in headers),
            "",
            "",
        ]
        self.socket.sendall("\r\n".join(lines).encode("latin-1") + body)

    def stop(self) -> None:
        """Say that nothing more comes."""
        self.socket.shutdown(socket.SHUT_WR)

    def answer(self) -> Answer:
        response = http.client.HTTPResponse(self.socket)
        response.begin()
        return Answer(response.status, response.headers, response.read())


@dataclass
class Door:
    """One server; requests are those of ``caller`` ann to ``/plain/x``, unless they say otherwise."""

    name: str
    web: Web
    store: Store

    @contextlib.contextmanager
    def connected(
        self,
        key: str | list[str] | None,
        path: str = "/plain/x",
        body: bytes = b"",
        *,
        method: str = "POST",
        caller: str | None = "ann",
        kind: str = "application/json",
        length: str | None = None,
        more: Headers | None = None,
    ) -> Iterator[Wire]:
        """Send a request, which need not be whole, and leave at the end."""
        keys = key if isinstance(key, list) else [key]
        headers = [("Idempotency-Key", each) for each in keys if each is not None]
        headers += [("Content-Type", kind), *(more or ())]
        if caller is not None:
            headers.append(("Authorization", f"Bearer {caller}"))
        if not dict(headers).get("Transfer-Encoding"):
            headers.append(("Content-Length", length or str(len(body))))
        wire = Wire(self.web.port)
        with contextlib.closing(wire.socket):
            wire.send(method, path, headers, body)
            yield wire

    def ask(self, *request: Any, **more: Any) -> Answer:
        """Send a request, and return the answer to it."""
        with self.connected(*request, **more) as wire:
            return wire.answer()

    def close(self) -> None:
        self.web.kill()
        self.store.close()

    def runs(self, key: str) -> int:
        path = self.file("runs", key)
        return path.stat().st_size if path.exists() else 0

    def file(self, kind: str, key: str) -> Path:
        return self.web.port_file.with_name(f"{kind}-{key}")

    def identity(self, key: str) -> Identity:
        """Return the identity of a key of ann's."""
        return http_identity("http", bearer_scope({"HTTP_AUTHORIZATION": "Bearer ann"}), key)


@dataclass
class Doors:
    """All of them, with records in one Redis, which they reach by a proxy."""

    proxy: Proxy
    all: dict[str, Door]

    def each(self, work: Callable[[Door], Any]) -> dict[str, Any]:
        """Do something at each door, at once."""
        with ThreadPoolExecutor(len(self.all)) as pool:
            return dict(zip(self.all, pool.map(work, self.all.values()), strict=True))


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    """All servers at work, and a Redis for them."""
    with embedded_redis() as redis, Proxy("127.0.0.1", redis.port) as proxy:
        doors = Doors(proxy, {})
        for name in DOORS:
            url = f"{redis.url()}?prefix={name}"
            behind = f"{proxy.url()}?prefix={name}"
            doors.all[name] = make_door(name, tmp_path_factory.mktemp(name), url, STORE=behind)
        try:
            doors.each(lambda door: door.web.start())
            yield doors
        finally:
            for door in doors.all.values():
                door.close()


def make_door(name: str, directory: Path, url: str, **env: str) -> Door:
    """Return a server that is not started yet, with records in the store with this URL."""
    command = [sys.executable, "-m", "tests.http.frameworks", name]
    web = Web(command, directory, child_environment({"STORE": url, **env}), "web")
    return Door(name, web, open_store(url))


Asked = dict[str, Any]

DJANGO = ("django-wsgi", "django-asgi")
ASGI = ("django-asgi", "fastapi", "starlette")


@pytest.fixture(params=DOORS)
def door(request: pytest.FixtureRequest, doors: Doors) -> Door:
    return doors.all[request.param]


@pytest.fixture
def key() -> str:
    return new_key()


# The table, by single requests: whatever is refused leaves the key free ----------------------------------------------


@dataclass(frozen=True)
class Refused:
    """A request, and the answer to it; some doors give ``others``."""

    status: int
    code: str
    request: dict[str, Any] = field(default_factory=dict)
    #: ``""``: no problem, but an answer of the server's own or of the application.
    others: dict[str, tuple[int, str]] = field(default_factory=dict)


INVALID = 400, "idempotency_key_invalid"
FORM, UPLOAD = "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="amount"\r\n\r\n1000\r\n--x--\r\n'
CHUNKS = {"more": [("Transfer-Encoding", "chunked")], "body": b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n"}

REFUSED = {
    "no key": Refused(400, "idempotency_key_missing", {"key": None}),
    "an empty key": Refused(*INVALID, {"key": '""'}),
    "two keys": Refused(*INVALID, {"key": ["a", "b"]}),
    "one key twice": Refused(*INVALID, {"key": ["a", "a"]}),
    "half a string": Refused(*INVALID, {"key": '"a'}),
    "a bare key with a space": Refused(*INVALID, {"key": "a b"}),
    "a long key": Refused(*INVALID, {"key": "k" * 256}),
    "a large body": Refused(413, "request_too_large", {"body": b"x" * 10_001}),
    "no caller": Refused(403, "caller_unknown", {"caller": None}),
    # A server refuses it, or the application sees a form of its own making.
    "a charset that is none": Refused(
        400,
        "body_unreadable",
        {"body": b"a=1", "kind": f"{FORM}; charset=base64"},
        # The middleware compares bytes, and leaves forms to the application.
        dict.fromkeys(("fastapi", "starlette", "flask"), (201, "")),
    ),
    "a body in chunks": Refused(
        411,
        "length_required",
        CHUNKS,
        # Their servers end the input; Django's WSGI takes a body in chunks for empty.
        dict.fromkeys((*ASGI, "flask"), (201, "")),
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_request_is_refused(door: Door, key: str, case: str) -> None:
    refused = REFUSED[case]
    status, code = refused.others.get(door.name, (refused.status, refused.code))
    answer = door.ask(**{"key": key, **refused.request})
    assert answer.status == status, answer.body
    if code:
        assert answer.problem() == (status, code)
        assert door.runs(key) == 0
        assert door.ask(key).status == 201, "the key is free"


@pytest.mark.parametrize("length", ["x", "-1", "5,5"])
def test_a_length_that_is_no_number_reaches_nothing(door: Door, key: str, length: str) -> None:
    with door.connected(key, body=b"a=1", length=length) as wire:
        wire.stop()
        # A server may refuse it by itself, or close the connection.
        with contextlib.suppress(http.client.HTTPException, OSError):
            answer = wire.answer()
            assert answer.status == 400
            if answer.headers["Content-Type"] == "application/problem+json":
                # hypercorn takes two equal lengths for one.
                assert answer.problem()[1] in {"body_unreadable", "body_incomplete"}
    assert door.runs(key) == 0


@pytest.mark.parametrize(
    ("kind", "whole", "cut"),
    [(FORM, b"currency=EUR&amount=1000", -3), (UPLOAD, PART, PART.index(b"000"))],
)
def test_a_body_that_breaks_off_reaches_nothing(
    door: Door, key: str, kind: str, whole: bytes, cut: int
) -> None:
    asked: Asked = {"kind": kind, "body": whole[:cut], "length": str(len(whole))}
    with door.connected(key, **asked):
        pass  # hangs up
    with door.connected(key, **asked) as wire:
        wire.stop()
        # A server of ASGI tells the application, and its client nothing, or answers by itself.
        with contextlib.suppress(http.client.HTTPException, OSError):
            answer = wire.answer()
            assert answer.status == 400
            assert not answer.body or answer.problem() == (400, "body_incomplete")
    answer = door.ask(key, kind=kind, body=whole)
    assert (answer.status, answer.replayed, answer.json["run"]) == (201, False, 1)


# The table, by a first request and a repetition ----------------------------------------------------------------------


def test_a_repetition_gets_the_first_response(door: Door, key: str) -> None:
    first, again, other = door.ask(key), door.ask(f'"{key}"'), door.ask(key, caller="bob")
    assert (first.status, first.json["run"], first.replayed) == (201, 1, False)
    assert (again.status, again.body, again.replayed) == (201, first.body, True)
    for name in ("Location", "Content-Type", "Content-Length"):
        assert again.headers.get_all(name) == first.headers.get_all(name)
    for name in ("Set-Cookie", "X-Request-Id"):
        assert (name in first.headers, name in again.headers) == (True, False)
    assert (other.status, other.json["run"], other.replayed) == (201, 2, False)


def test_a_response_that_invites_another_try_releases_the_key(door: Door) -> None:
    for status in (400, 401, 403, 413, 429, 500, 503):
        key = new_key()
        first, again, third = (door.ask(key, f"/status/{status}") for _ in range(3))
        assert (first.status, first.json, first.replayed) == (status, {"run": 1}, False)
        assert (again.status, again.json, again.replayed) == (200, {"run": 2}, False), status
        assert (third.json, third.replayed) == ({"run": 2}, True)


def test_any_other_response_is_kept(door: Door) -> None:
    for status in (200, 302, 402, 404, 409, 422):
        key = new_key()
        first, again = door.ask(key, f"/status/{status}"), door.ask(key, f"/status/{status}")
        assert (first.status, again.status) == (status, status)
        assert (again.replayed, again.body) == (True, first.body)


@pytest.mark.parametrize("path", ["/broken/x", "/unsendable/nul", "/unsendable/lines"])
def test_an_exception_or_a_header_that_no_server_sends_releases_the_key(
    door: Door, key: str, path: str
) -> None:
    with contextlib.suppress(http.client.HTTPException):
        assert door.ask(key, path).status == 500
    again = door.ask(key, path)
    assert (again.json, again.replayed, again.headers["Set-Cookie"]) == ({"run": 2}, False, None)


def test_a_response_over_the_limit_comes_whole_and_is_not_repeated(door: Door, key: str) -> None:
    count, size = PIECES
    large = b"".join(b"%d" % number * size for number in range(count))
    assert door.ask(key, "/large/x").body == large
    assert door.ask(key, "/large/x").problem() == (410, "result_not_kept")


def test_a_replay_that_authorize_refuses_is_403(door: Door, key: str) -> None:
    assert door.ask(key, more=[("X-Refused", "1")]).status == 201
    refused = door.ask(key, more=[("X-Refused", "1")])
    assert refused.status == 403
    if door.name not in DJANGO:  # a PermissionDenied, for which a project has a page of its own
        assert refused.problem() == (403, "replay_refused")
    assert door.ask(key).replayed


def test_while_the_first_runs_a_repetition_is_409_and_another_request_422(
    door: Door, key: str
) -> None:
    with door.connected(key, "/held/x") as first:
        wait_for(lambda: door.runs(key), 30)
        held = door.ask(key, "/held/x")
        assert held.problem() == (409, "request_in_progress")
        assert held.headers["Retry-After"] == "1"
        assert held.json["retryable"] is True
        other = door.ask(key, "/held/y")
        assert other.problem() == (422, "idempotency_key_reused")
        assert other.json["retryable"] is False
        door.file("go", key).touch()
        assert (answer := first.answer()).json == {"run": 1}
    assert door.ask(key, "/held/x").body == answer.body


@pytest.mark.parametrize("path", ["/held/x", "/held/sync"])
def test_a_client_that_hangs_up_does_not_stop_the_run(door: Door, key: str, path: str) -> None:
    with door.connected(key, path):
        wait_for(lambda: door.runs(key), 30)
    # Long enough for the server to hear of it, and to give the key back if it were so minded.
    assert [door.ask(key, path).status for _ in range(10)] == [409] * 10
    door.file("go", key).touch()
    answer = door.web.until(lambda: door.ask(key, path), other_than=409)
    assert (answer.status, answer.replayed, answer.json) == (200, True, {"run": 1})


def test_of_a_burst_of_fifty_one_runs(door: Door, key: str) -> None:
    answers = all_at_once(50, lambda _: door.ask(key))
    assert {answer.status for answer in answers} <= {201, 409}
    assert len({answer.body for answer in answers if answer.status == 201}) == 1
    assert door.runs(key) == 1


def test_a_record_of_trouble_is_told(door: Door) -> None:
    def held(lease_ms: int) -> bool:
        with contextlib.suppress(AssertionError):
            claim_key(door.store, door.identity(keys[0]), lease_ms=lease_ms)
            return True
        return False

    keys = [new_key() for _ in range(3)]
    for _ in range(5):
        wait_for(lambda: held(1), 30)
    settle_key(door.store, door.identity(keys[1]), State.COMPLETED)
    settle_key(door.store, door.identity(keys[2]), State.FAILED)
    assert [door.ask(key).problem() for key in keys] == [
        (500, "too_many_crashes"),
        (410, "result_not_kept"),
        (500, "task_failed"),
    ]


def test_work_after_the_response_comes_after_the_record(door: Door, key: str) -> None:
    if door.name in DJANGO:
        pytest.skip("Django has no such work")
    assert door.ask(key, "/later/x").json == {"run": 1}
    assert door.ask(key, "/later/x").replayed
    assert not door.file("done", key).exists()
    door.file("go", key).touch()
    wait_for(door.file("done", key).exists, 30)
    assert door.ask(key, "/later/x").replayed


@pytest.mark.parametrize("name", ["fastapi", "flask"])
def test_below_a_prefix_of_the_server_the_same_paths_are_guarded(
    name: str, redis_url: str, prefix: str, tmp_path: Path, key: str
) -> None:
    url = f"{redis_url}?prefix={prefix}"
    door = make_door(name, tmp_path, url, SCRIPT_NAME="/api", PATHS="/plain")
    # A proxy in front of uvicorn cuts the prefix off, one in front of gunicorn does not.
    path = "/plain/x" if name == "fastapi" else "/api/plain/x"
    try:
        door.web.start()
        assert door.ask(None, path).problem() == (400, "idempotency_key_missing")
        assert [door.ask(key, path).replayed for _ in range(2)] == [False, True]
    finally:
        door.close()


# Trouble, at all doors at once ---------------------------------------------------------------------------------------


def test_while_the_store_is_down_it_is_503_and_nothing_runs(doors: Doors, key: str) -> None:
    def refused(door: Door) -> Any:
        answer = door.ask(key)
        assert answer.headers["Retry-After"] == "1"
        return answer.problem(), answer.json["retryable"], door.runs(key)

    doors.proxy.refuse()
    try:
        answers = doors.each(refused)
    finally:
        doors.proxy.heal()
    assert answers == dict.fromkeys(DOORS, ((503, "store_unavailable"), True, 0))
    assert set(doors.each(lambda door: door.ask(key).status).values()) == {201}


def test_after_a_killed_server_the_next_attempt_after_the_lease_runs(
    doors: Doors, key: str
) -> None:
    def kill(door: Door) -> tuple[int, bool, Any]:
        with door.connected(key, "/held/x"):
            wait_for(lambda: door.runs(key), 30)
            door.web.kill()
        door.web.start()
        answer = door.web.until(lambda: door.ask(key, "/held/x"), other_than=409)
        return answer.status, answer.replayed, answer.json

    assert doors.each(kill) == dict.fromkeys(DOORS, (200, False, {"run": 2}))


@pytest.mark.parametrize("name", ["django-wsgi", "flask"])
def test_a_server_that_ends_slow_workers_gets_the_response_before_a_silent_store_is_back(
    name: str, private_redis: EmbeddedRedis, tmp_path: Path, key: str
) -> None:
    url = f"{private_redis.url()}?socket_timeout=0.5"
    # One thread: a sync worker, which tells its arbiter nothing while it answers.
    door = make_door(name, tmp_path, url, THREADS="1", WORKER_TIMEOUT="8", LEASE="30")
    try:
        door.web.start()
        with door.connected(key, "/held/x") as first:
            wait_for(lambda: door.runs(key), 30)
            private_redis.freeze()
            door.file("go", key).touch()
            assert first.answer().json == {"run": 1}
        private_redis.thaw()
        again = door.web.until(lambda: door.ask(key, "/held/x"), other_than=409)
        assert (again.status, again.replayed, door.runs(key)) == (200, True, 1)
    finally:
        private_redis.thaw()
        door.close()


# Pairs ---------------------------------------------------------------------------------------------------------------


def json(*bodies: str, kind: str = "application/json") -> list[Asked]:
    return [{"body": body.encode(), "kind": kind} for body in bodies]


def form(*bodies: str) -> list[Asked]:
    return [{"body": body.encode(), "kind": FORM} for body in bodies]


def upload(boundary: str, *parts: tuple[str, str]) -> Asked:
    """Return a multipart form; a name may have more than the name of a field."""
    head = 'Content-Disposition: form-data; name="{}"'
    lines = [f"--{boundary}\r\n{head.format(n)}\r\n\r\n{value}\r\n" for n, value in parts]
    quoted = f'"{boundary}"' if " " in boundary else boundary
    body = "".join([*lines, f"--{boundary}--\r\n"]).encode()
    return {"body": body, "kind": f"multipart/form-data; boundary={quoted}"}


def file(name: str, content: str) -> Asked:
    return upload("x", (f'file"; filename="{name}', content))


def broken_off(value: str) -> Asked:
    form = upload("one", ("a", value))
    return {**form, "body": form["body"].removesuffix(b"--one--\r\n")}


def at(*paths: str) -> list[Asked]:
    return [{"path": f"/plain/{path}"} for path in paths]


#: Each of a group is the same request as its first.
EQUAL: list[list[Asked]] = [
    json('{"a":1,"b":[1,2]}', ' { "b" : [1, 2], "a": 1 }'),
    json('"\\u00e9"', '"é"'),
    json('{"a":1}', '{"a": 1}', kind="application/merge-patch+json"),
    json('{"a":1}', '{"a": 1}', kind="application/json; charset=utf-8"),
    json("0.1", "0.10", "0.1000000000000"),
    json("1.0", "1.00"),
    json("0.0", "0.00000"),
    json(f"{'[' * 100}1,2{']' * 100}", f"{'[' * 100} 1, 2 {']' * 100}"),
    at("x?x=1&y=2", "x?y=2&x=1"),
    at("x?a=%20", "x?a=+"),
    form("a=1&b=%C3%A9", "b=é&a=1"),
    form("a=x+y", "a=x%20y"),
    [upload("one", ("a", "1"), ("b", "2")), upload("t w o", ("b", "2"), ("a", "1"))],
    [upload("one", ("a", "1"), ("a", "2")), upload("two", ("a", "1"), ("a", "2"))],
    [{**upload(each, ("a", "1")), "method": "PUT"} for each in ("one", "two")],
    [file("a.txt", "one"), file("a.txt", "one")],
]
#: Each of a group is another request than its first.
UNEQUAL: list[list[Asked]] = [
    json('{"a":1}', '{"a":1.0}', '{"a":"1"}', '{"a":true}', '{"a":null}', "{}", "", "{"),
    json('{"a":1}', '{"a":1,"a":2}', '[{"a":1}]', '{"A":1}'),
    json("[1,2]", "[2,1]", "[1]", "[[1,2]]"),
    json("{", "{ "),
    json('{"a":1}', '{"a": 1}', kind="text/plain"),
    [*json('{"a":1}'), *json('{"a":1}', kind="text/plain")],
    json("0.1", "0.10000000000000001", "0.1000000000000000055511151231257827", '"0.1"', "-0.1"),
    json("1.0", "1", "10.0"),
    json("9007199254740993.0", "9007199254740992.0", "9007199254740993", "9007199254740992"),
    json("1e400", "1e401", "-1e400", "Infinity", '"1e400"'),
    json("0.0", "-0.0", "1e-400", "2e-400", "NaN"),
    json("123456789012345.123", "123456789012345.124", "123456789012345.12"),
    json("1" * 5000, "1" * 5001),
    json("[" * 5000, "[" * 5001),
    json('{"__type__":"decimal","__value__":"0.1"}', "0.1"),
    [{"method": "POST"}, {"method": "PUT"}],
    at("x", "y", "x?x=1", "x?x=", "x?=x"),
    at("x?x=1", "x?x=2", "x?y=1"),
    at("x?x=1&x=2", "x?x=2&x=1"),
    form("a=1", "a=2", "a=1&a=1", "a=", "b=1"),
    [upload("x", ("a", "1")), upload("x", ("a", "2")), upload("x", ("b", "1"))],
    [upload("x", ("a", "1"), ("a", "2")), upload("y", ("a", "2"), ("a", "1"))],
    [upload("x", ("a", "1x0")), upload("x", ("a", "10"))],
    [broken_off("1"), broken_off("2")],
    [file("a.txt", "one"), file("a.txt", "two"), file("b.txt", "one"), file("a.txt", "")],
    [file("a.txt", "one"), upload("x", ("file", "one"))],
]


def test_requests_that_say_the_same_are_one(door: Door) -> None:
    for first, *others in EQUAL:
        key = new_key()
        assert door.ask(key, **first).status == 201, first
        for other in others:
            assert door.ask(key, **other).replayed, other


def test_requests_that_say_something_else_are_others(door: Door) -> None:
    for first, *others in UNEQUAL:
        key = new_key()
        assert door.ask(key, **first).status == 201, first
        for other in others:
            assert door.ask(key, **other).problem() == (422, "idempotency_key_reused"), other


def test_the_bytes_of_a_form_that_is_not_utf_8_count_where_the_application_sees_them(
    door: Door, key: str
) -> None:
    one, two = ({"body": body, "kind": FORM} for body in (b"a=%FF", b"a=%FE"))
    assert door.ask(key, **one).status == 201
    # A view of Django's sees one replacement character for both.
    assert door.ask(key, **two).status == (201 if door.name in DJANGO else 422)


# Rules of others ------------------------------------------------------------------------------------------------------


def test_a_response_is_kept_for_a_day(doors: Doors, door: Door, key: str) -> None:
    assert door.ask(key).status == 201
    with contextlib.closing(Redis.from_url(doors.proxy.url())) as client:
        (name,) = client.scan_iter(f"{door.name}:*{key}", count=10_000)
        assert 86_300 < client.ttl(name) <= 86_400


def test_a_get_needs_no_key(door: Door) -> None:
    """The application has no such route."""
    assert door.ask(None, "/nowhere", method="GET").status in {404, 405}


#: What the draft and Stripe's documentation ask for, as the page on HTTP has it, and the test of it.
RULES: dict[str, object] = {
    "The key is a string of RFC 9651": test_a_repetition_gets_the_first_response,
    "A key has up to 255 characters": test_a_request_is_refused,
    "A request without a key is `400`": test_a_request_is_refused,
    "A `GET` needs no key": test_a_get_needs_no_key,
    "A key belongs to one caller": test_a_repetition_gets_the_first_response,
    "A repetition gets the first status and body": test_any_other_response_is_kept,
    "A replay says that it is one": test_a_repetition_gets_the_first_response,
    "A `500` is repeated": test_a_response_that_invites_another_try_releases_the_key,
    "A request that is refused before it runs stores nothing": test_a_request_is_refused,
    "Until the first request is answered: `409`": (
        test_while_the_first_runs_a_repetition_is_409_and_another_request_422
    ),
    "A key of another request is `422`": test_requests_that_say_something_else_are_others,
    "Errors are problems of RFC 9457": test_a_request_is_refused,
    "Keys live for a day": test_a_response_is_kept_for_a_day,
}


def test_the_page_names_each_rule() -> None:
    page = (ROOT / "docs" / "http.md").read_text()
    table = page.partition("## Differences from the draft and from Stripe")[2].partition("\n## ")[0]
    rules = re.findall(r"^- (.+?) \((?:draft|Stripe|both)", table, re.MULTILINE)
    assert rules == [*RULES]


# Deliveries ----------------------------------------------------------------------------------------------------------


@pytest.mark.wide
def test_987_deliveries_of_324_events_take_effect_324_times(door: Door) -> None:
    """By 50 clients, of whom one in five hangs up, over 25 kills of the server."""
    seeded = random.Random(17)
    events = [new_key() for _ in range(324)]
    deliveries = events + seeded.choices(events, k=987 - len(events))
    seeded.shuffle(deliveries)
    todo, done = deque(deliveries), list[Answer]()

    def deliver() -> None:
        while len(done) < len(deliveries):
            time.sleep(random.random())
            try:
                event = todo.popleft()
            except IndexError:
                continue
            request: Asked = {"path": "/event/x", "body": b'{"event": "%s"}' % event.encode()}
            try:
                if random.random() < 0.2:
                    with door.connected(event, **request):
                        raise TimeoutError
                answer = door.ask(event, **request)
            except (OSError, http.client.HTTPException):
                todo.append(event)  # delivered once more
            else:
                if answer.status in {409, 503}:
                    todo.append(event)
                else:
                    done.append(answer)

    def is_done(number: int) -> bool:
        return len(done) >= number

    with ThreadPoolExecutor(50) as pool:
        clients = [pool.submit(deliver) for _ in range(50)]
        for kill in range(1, 26):
            wait_for(partial(is_done, 35 * kill), 120)
            door.web.kill()
            door.web.start()
    for client in clients:
        client.result()
    directory = door.web.port_file.parent
    effects = len(list(directory.glob("effect-*")))
    runs = sum(door.runs(event) for event in events)
    sys.stdout.write(f"{door.name}: {len(done)} answers, {effects} effects, {runs} runs\n")
    # A key whose server was killed four times is left to a person: its effect is done.
    others = [answer for answer in done if b'"too_many_crashes"' not in answer.body]
    assert [answer for answer in others if answer.status != 200] == []
    assert (len(done), effects) == (987, 324)
    # One run more for each that was killed.
    assert 324 <= runs <= 324 + 25 * 50
