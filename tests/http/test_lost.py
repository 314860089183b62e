"""A web process that is lost on the way: what was promised happens, and what may not happen is not promised."""

from __future__ import annotations

import http.client
import sys
from collections.abc import Iterator

import pytest

from tests.http.sites import ORDER, Site, Web, new_key
from tests.http.sweeping import sweep


@pytest.fixture
def doomed(site: Site) -> Iterator[Web]:
    """Another web server of the site, which is lost before it publishes anything."""
    web = Web([sys.executable, "-m", "testproject.web", "0"], site.directory, site.env, "doomed")
    site.children.append(web)
    yield web.start()
    web.kill()


@pytest.fixture
def brokerless(site: Site) -> Iterator[Web]:
    """Another web server of the site, whose broker is down and whose store is not."""
    command = [sys.executable, "-m", "testproject.web", "0"]
    env = {**site.env, "BROKER_URL": "redis://127.0.0.1:1/0"}
    web = Web(command, site.directory, env, "brokerless")
    site.children.append(web)
    yield web.start()
    web.kill()


def lose(site: Site, web: Web, path: str, key: str) -> None:
    """Send a request that takes its web server down."""
    doom = site.directory / "doom"
    doom.touch()
    try:
        with pytest.raises((http.client.HTTPException, OSError)):
            web.ask("POST", path, ORDER, key=key)
    finally:
        doom.unlink()


def test_what_was_reserved_and_never_published_is_sent_by_a_sweep(site: Site, doomed: Web) -> None:
    key = new_key()
    lose(site, doomed, "/payments/", key)
    again = site.pay(key=key)
    assert (again.status, again.replayed, again.json["state"]) == (202, True, "QUEUED")
    assert site.status(again).json["state"] == "QUEUED"
    assert site.payments(key) == 0
    assert sweep("store", site.directory, site.env).split()[-1:] == ["1"]
    assert site.settled(again)["state"] == "COMPLETED"
    last = site.pay(key=key)
    assert (last.status, last.json["state"]) == (200, "COMPLETED")
    assert site.payments(key) == 1


def test_while_the_broker_is_down_it_is_503_and_the_key_stays_free(
    site: Site, brokerless: Web
) -> None:
    key = new_key()
    answer = brokerless.ask("POST", "/payments/", ORDER, key=key)
    assert answer.problem() == (503, "not_queued")
    assert answer.json["retryable"] is True
    assert int(answer.headers["Retry-After"]) >= 1
    unknown = site.ask("GET", f"/idempotency/testproject.payments.tasks.pay/{key}")
    assert unknown.problem() == (404, "unknown_key")
    first = site.pay(key=key)
    assert (first.status, first.replayed) == (202, False)
    site.settled(first)
    again = brokerless.ask("POST", "/payments/", ORDER, key=key)
    assert (again.status, again.replayed) == (200, True), "what is done needs no broker"
    assert site.payments(key) == 1
