"""FastAPI under uvicorn and Flask under gunicorn, each in a process of its own, with records in Redis."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.http.frameworks import PIECES
from tests.http.sites import Answer, Web, at_once, new_key
from tests.support.waiting import wait_for
from tests.support.workers import child_environment

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module", params=["fastapi", "flask"])
def web(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> Iterator[Web]:
    directory = tmp_path_factory.mktemp(request.param)
    prefix = f"test-{new_key()}"
    env = {**child_environment(), "STORE": f"{redis_url}?prefix={prefix}"}
    web = Web([sys.executable, "-m", "tests.http.frameworks", request.param], directory, env, "web")
    try:
        yield web.start()
    finally:
        web.kill()


@pytest.fixture
def key() -> str:
    return new_key()


@pytest.fixture
def ask(web: Web, key: str) -> Callable[..., Answer]:
    """Send a request with the key of this test."""

    def ask(path: str, body: bytes = b"", caller: str = "ann") -> Answer:
        credentials = f"Bearer {caller}"
        return web.ask("POST", path, body, key=key, user=None, Authorization=credentials)

    return ask


def runs(web: Web, key: str) -> int:
    path = web.port_file.with_name(f"runs-{key}")
    return path.stat().st_size if path.exists() else 0


@contextlib.contextmanager
def connected(web: Web, path: str, key: str, head: str, body: bytes) -> Iterator[socket.socket]:
    """Send what need not be a whole request, and leave."""
    lines = (
        f"POST {path} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer ann\r\nIdempotency-Key: {key}"
    )
    with socket.create_connection(("127.0.0.1", web.port), 30) as connection:
        connection.sendall(f"{lines}\r\n{head}\r\n\r\n".encode() + body)
        yield connection


def test_a_repetition_gets_the_first_response(ask: Callable[..., Answer]) -> None:
    first, again, other = ask("/plain"), ask("/plain"), ask("/plain", caller="bob")
    assert (first.status, first.json["run"], first.replayed) == (201, 1, False)
    assert (again.status, again.body, again.replayed) == (201, first.body, True)
    for name in ("Location", "Content-Type", "Content-Length"):
        assert again.headers.get_all(name) == first.headers.get_all(name)
    assert (other.status, other.json["run"], other.replayed) == (201, 2, False)


def test_of_a_burst_one_runs(web: Web, ask: Callable[..., Answer], key: str) -> None:
    answers = at_once(partial(ask, "/plain"), 20)
    assert {answer.status for answer in answers} <= {201, 409}
    assert len({answer.body for answer in answers if answer.status == 201}) == 1
    assert runs(web, key) == 1


def test_a_client_that_hangs_up_does_not_stop_the_run(
    web: Web, ask: Callable[..., Answer], key: str
) -> None:
    with connected(web, "/held", key, "Content-Length: 0", b""):
        wait_for(lambda: runs(web, key), 30)
    assert [ask("/held").status for _ in range(10)] == [409] * 10
    web.port_file.with_name(f"go-{key}").touch()
    answer = web.until(partial(ask, "/held"), other_than=409)
    assert (answer.status, answer.replayed, answer.json) == (200, True, {"run": 1})


def test_after_a_killed_server_the_next_attempt_after_the_lease_runs(
    web: Web, ask: Callable[..., Answer], key: str
) -> None:
    with connected(web, "/held", key, "Content-Length: 0", b""):
        wait_for(lambda: runs(web, key), 30)
        web.kill()
    web.start()
    answer = web.until(partial(ask, "/held"), other_than=409)
    assert (answer.status, answer.replayed, answer.json) == (200, False, {"run": 2})


def test_a_response_over_the_limit_comes_whole_and_is_not_repeated(
    ask: Callable[..., Answer],
) -> None:
    count, size = PIECES
    assert ask("/large").body == b"".join(b"%d" % number * size for number in range(count))
    assert ask("/large").problem() == (410, "result_not_kept")


def test_a_body_in_chunks_is_whole_or_nothing_runs(
    web: Web, ask: Callable[..., Answer], key: str
) -> None:
    head = "Transfer-Encoding: chunked"
    with connected(web, "/echo", key, head, b"3\r\nabc\r\n") as connection:
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
    assert runs(web, key) == 0
    with connected(web, "/echo", key, head, b"3\r\nabc\r\n1\r\nd\r\n0\r\n\r\n") as connection:
        response = http.client.HTTPResponse(connection)
        response.begin()
        told = Answer(response.status, response.headers, response.read())
    assert (told.status, told.json) == (200, {"run": 1, "bytes": 4})
    assert ask("/echo", b"x" * 100_001).problem() == (413, "request_too_large")


def test_what_the_application_does_after_its_response_comes_after_the_record(
    web: Web, ask: Callable[..., Answer], key: str
) -> None:
    def path(name: str) -> Path:
        return web.port_file.with_name(f"{name}-{key}")

    assert ask("/later").json == {"run": 1}
    assert ask("/later").replayed
    assert not path("done").exists()
    path("go").touch()
    wait_for(path("done").exists, 30)
    answer: Any = ask("/later")
    assert answer.replayed
