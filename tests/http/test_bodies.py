"""Views of Django of every kind, and clients that stop halfway: what did not arrive whole claims nothing."""

from __future__ import annotations

import contextlib
import sqlite3
import sys
from typing import Any

import pytest

from celery_idempotent.stores import open_store
from tests.http.doors import Door
from tests.http.sites import Site, Web, new_key
from tests.support.waiting import wait_for

FORM = "application/x-www-form-urlencoded"
PART = b'--x\r\nContent-Disposition: form-data; name="amount"\r\n\r\n1000\r\n--x--\r\n'

#: What says 1000, cut where it says less.
BODIES = {
    "form": (FORM, b"currency=EUR&amount=1000", b"currency=EUR&amount=1"),
    "upload": ("multipart/form-data; boundary=x", PART, PART[: PART.index(b"1000") + 1]),
}
VIEWS = ("form", "form_read", "rest_form")
QUEUEING = ("form_later", "form_bare_later", "aform_later")


@pytest.fixture(scope="module")
def door(running: Site) -> Door:
    """A server as in production; other tests use Django's own."""
    command = [sys.executable, "-m", "tests.http.servers", "wsgi"]
    web = Web(command, running.directory, running.env, "gunicorn")
    running.children.append(web)
    return Door("gunicorn", web.start(), open_store("memory://"))


def asked(name: str, form: str, *, whole: bool = True) -> dict[str, Any]:
    """Return a request of alice's, whole or cut."""
    kind, body, part = BODIES[form]
    more = [("X-Caller", "c"), ("Authorization", "Basic YWxpY2U6YWxpY2U=")]
    about = {"path": f"/t/{name}/", "kind": kind, "caller": None, "more": more}
    return {**about, "body": body if whole else part, "length": str(len(body))}


def paid(site: Site, key: str) -> list[int]:
    """Return the amounts that were paid with a key."""
    asking = "SELECT amount FROM payments_payment WHERE key = ?"
    with contextlib.closing(sqlite3.connect(site.directory / "db.sqlite3")) as database:
        return [int(amount) for (amount,) in database.execute(asking, (key,))]


@pytest.mark.parametrize("form", BODIES)
@pytest.mark.parametrize("name", [*VIEWS, *QUEUEING])
def test_a_body_that_breaks_off_is_refused_and_its_key_is_free(
    site: Site, door: Door, name: str, form: str
) -> None:
    key = new_key()
    with door.connected(key, **asked(name, form, whole=False)):
        pass  # hangs up
    with door.connected(key, **asked(name, form, whole=False)) as wire:
        wire.stop()
        broken = wire.answer()
    assert broken.problem() == (400, "body_incomplete")
    assert broken.json["retryable"] is True
    assert door.runs(key) == 0
    answer = door.ask(key, **asked(name, form))
    assert (answer.status, answer.replayed) == (201 if name in VIEWS else 202, False)
    if name in VIEWS:
        assert b"1000" in answer.body
        assert door.runs(key) == 1
    else:
        wait_for(lambda: paid(site, key), 30)
        assert paid(site, key) == [1000]


def test_under_asgi_a_client_that_leaves_halfway_reaches_no_view(asgi: Web) -> None:
    door = Door("asgi", asgi, open_store("memory://"))
    for name in ("form", "form_later", "aform_later"):
        key = new_key()
        with door.connected(key, **asked(name, "form", whole=False)):
            pass
        answer = door.ask(key, **asked(name, "form"))
        assert (answer.status, answer.replayed) == (201 if name == "form" else 202, False)


@pytest.mark.parametrize("name", [*VIEWS, *QUEUEING])
def test_a_chunked_body_is_411_under_wsgi(door: Door, name: str) -> None:
    key, whole = new_key(), asked(name, "upload")
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(PART), PART)
    chunks = {**whole, "body": body, "more": [*whole["more"], ("Transfer-Encoding", "chunked")]}
    assert door.ask(key, **chunks).problem() == (411, "length_required")
    assert door.ask(key, **whole).status < 300, "the key is free"
