"""Real servers, and clients that stop halfway: what did not arrive whole is refused, and claims nothing."""

from __future__ import annotations

import contextlib
import http.client
import socket
import sqlite3
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from tests.http.sites import Answer, Site, Web, new_key
from tests.support.waiting import wait_for

FORM = "application/x-www-form-urlencoded"
BOUNDARY = "multipart/form-data; boundary=x"
PART = b'--x\r\nContent-Disposition: form-data; name="amount"\r\n\r\n1000\r\n--x--\r\n'

#: What says 1000, cut where it says less.
BODIES = {
    "form": (FORM, b"currency=EUR&amount=1000", b"currency=EUR&amount=1"),
    "upload": (BOUNDARY, PART, PART[: PART.index(b"1000") + 1]),
}
VIEWS = ("form", "form_read", "rest_form")
QUEUEING = ("form_later", "form_bare_later", "aform_later")


@pytest.fixture(scope="module")
def web(running: Site) -> Web:
    """A server as in production; other tests use Django's own."""
    command = [sys.executable, "-m", "tests.http.servers", "wsgi"]
    web = Web(command, running.directory, running.env, "gunicorn")
    running.children.append(web)
    return web.start()


@dataclass(frozen=True)
class Client:
    """Says what it likes to a server, byte by byte."""

    web: Web
    name: str
    key: str

    def ask(self, kind: str, body: bytes, **headers: object) -> Answer:
        """Send a request that need not be one, and no more; hear the answer."""
        with self._connected(kind, body, headers) as connection:
            connection.shutdown(socket.SHUT_WR)
            response = http.client.HTTPResponse(connection)
            response.begin()
            return Answer(response.status, response.headers, response.read())

    def hang_up(self, kind: str, body: bytes, **headers: object) -> None:
        """Send a request that need not be one, and leave."""
        with self._connected(kind, body, headers):
            pass

    def whole(self, kind: str, body: bytes) -> Answer:
        return self.ask(kind, body, Content_Length=len(body))

    @contextlib.contextmanager
    def _connected(self, kind: str, body: bytes, headers: dict[str, object]) -> Any:
        head = {
            "Host": "127.0.0.1",
            "Idempotency-Key": self.key,
            "X-Caller": "c",
            "Authorization": "Basic YWxpY2U6YWxpY2U=",
            "Content-Type": kind,
            **{name.replace("_", "-"): value for name, value in headers.items()},
        }
        lines = [f"POST /t/{self.name}/ HTTP/1.1", *(f"{k}: {v}" for k, v in head.items()), "", ""]
        with socket.create_connection(("127.0.0.1", self.web.port), 30) as connection:
            connection.sendall("\r\n".join(lines).encode() + body)
            yield connection


def runs(site: Site, key: str) -> int:
    path = site.directory / f"runs-{key}"
    return path.stat().st_size if path.exists() else 0


def paid(site: Site, key: str) -> list[int]:
    """Return the amounts that were paid with a key."""
    with contextlib.closing(sqlite3.connect(site.directory / "db.sqlite3")) as database:
        return [
            int(amount)
            for (amount,) in database.execute(
                "SELECT amount FROM payments_payment WHERE key = ?", (key,)
            )
        ]


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("name", VIEWS)
def test_a_body_that_breaks_off_is_refused_and_its_key_is_free(
    site: Site, web: Web, name: str, form: str
) -> None:
    kind, whole, part = BODIES[form]
    client = Client(web, name, new_key())
    client.hang_up(kind, part, Content_Length=len(whole))
    broken = client.ask(kind, part, Content_Length=len(whole))
    assert broken.problem() == (400, "body_incomplete")
    assert broken.json["retryable"] is True
    assert runs(site, client.key) == 0
    answer = client.whole(kind, whole)
    assert (answer.status, answer.replayed) == (201, False)
    assert b"1000" in answer.body
    assert runs(site, client.key) == 1


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("name", QUEUEING)
def test_a_body_that_breaks_off_is_not_queued(site: Site, web: Web, name: str, form: str) -> None:
    kind, whole, part = BODIES[form]
    client = Client(web, name, new_key())
    client.hang_up(kind, part, Content_Length=len(whole))
    assert client.ask(kind, part, Content_Length=len(whole)).problem() == (400, "body_incomplete")
    assert client.whole(kind, whole).status == 202
    wait_for(lambda: paid(site, client.key), 30)
    assert paid(site, client.key) == [1000]


def test_under_asgi_a_client_that_leaves_halfway_reaches_no_view(site: Site, asgi: Web) -> None:
    for name in ("form", "form_later", "aform_later"):
        kind, whole, part = BODIES["form"]
        client = Client(asgi, name, new_key())
        client.hang_up(kind, part, Content_Length=len(whole))
        answer = client.web.ask(
            "POST", f"/t/{name}/", whole, key=client.key, X_Caller="c", Content_Type=kind
        )
        assert (answer.status, answer.replayed) == (201 if name == "form" else 202, False)


def chunked(body: bytes) -> bytes:
    pieces = [body[at : at + 7] for at in range(0, len(body), 7)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


@pytest.mark.parametrize("name", [*VIEWS, *QUEUEING])
def test_a_chunked_body_is_411_under_wsgi(site: Site, web: Web, name: str) -> None:
    kind, whole, _ = BODIES["upload"]
    client = Client(web, name, new_key())
    refused = client.ask(kind, chunked(whole), Transfer_Encoding="chunked")
    assert refused.problem() == (411, "length_required")
    assert client.whole(kind, whole).status < 300, "the key is free"
