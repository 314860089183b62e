"""Views of every kind take effect once for each key, and their answers are repeated as they were, or not at all."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

import pytest

from tests.http.sites import Answer, Site, Web, at_once, in_background, new_key
from tests.support.waiting import wait_for


@pytest.fixture(params=["wsgi", "asgi"])
def web(request: pytest.FixtureRequest, site: Site) -> Web:
    return site.web if request.param == "wsgi" else request.getfixturevalue("asgi")


def post(web: Any, name: str, body: Any = None, *, key: str | None, **headers: Any) -> Answer:
    headers.setdefault("X_Caller", "carol")
    answer: Answer = web.ask(
        "POST", f"/t/{name}/", b"" if body is None else body, key=key, **headers
    )
    return answer


def runs(site: Site, key: str) -> int:
    path = site.directory / f"runs-{key}"
    return path.stat().st_size if path.exists() else 0


@pytest.mark.parametrize(
    "name",
    [
        *("plain", "coroutine", "classy", "async-classy", "by-method/7", "template"),
        *("rest_inside", "things"),
    ],
)
def test_a_view_of_any_kind_runs_once_and_answers_twice(site: Site, web: Web, name: str) -> None:
    key = new_key()
    first, again = (post(web, name, {"a": 1}, key=key) for _ in range(2))
    assert 200 <= first.status < 300
    assert (first.replayed, again.replayed) == (False, True)
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers["Content-Type"] == first.headers["Content-Type"]
    other = post(web, name, {"a": 2}, key=key)
    assert other.problem() == (422, "idempotency_key_reused")
    assert post(web, name, {"a": 1}, key=None).problem() == (400, "idempotency_key_missing")
    assert runs(site, key) == 1


@pytest.mark.parametrize("name", ["rest_inside", "things"])
def test_in_the_rest_framework_the_caller_is_who_it_authenticated(site: Site, name: str) -> None:
    key = new_key()
    assert post(site, name, {}, key=key, user="alice").status < 300
    assert post(site, name, {}, key=key, user="bob").replayed is False
    assert post(site, name, {}, key=key, user=None).problem()[0] == 401
    assert runs(site, key) == 2


def test_coroutines_run_at_the_same_time_and_each_key_once(site: Site, asgi: Web) -> None:
    keys = [new_key() for _ in range(4)] * 3
    remaining = iter(keys)
    answers = at_once(lambda: post(asgi, "coroutine", key=next(remaining)), len(keys))
    assert {answer.status for answer in answers} <= {201, 409}
    for key in set(keys):
        assert runs(site, key) == 1
        assert post(asgi, "coroutine", key=key).status == 201


def test_safe_methods_pass(site: Site) -> None:
    for key in (None, new_key(), "bad key,"):
        answer = site.ask("GET", "/t/classy/", key=key)
        assert (answer.status, answer.json) == (200, {"key": None})
    assert site.ask("OPTIONS", "/t/classy/").status == 200


def test_a_patient_view_waits_for_the_first_answer(site: Site) -> None:
    key = new_key()
    answers = at_once(lambda: post(site, "patient", key=key), 5)
    assert {(answer.status, answer.body) for answer in answers} == {(200, b'{"run": 1}')}
    assert [answer.replayed for answer in answers].count(True) == 4


def test_a_view_that_takes_longer_than_its_lease_keeps_its_key(site: Site) -> None:
    key = new_key()
    path = "/t/slow/?seconds=4"  # the lease is 3
    running = in_background(lambda: site.ask("POST", path, b"", key=key, X_Caller="c"))
    wait_for(lambda: runs(site, key) == 1, 30)
    while not running.done():
        answer = site.ask("POST", path, b"", key=key, X_Caller="c")
        assert answer.status == 409 or answer.replayed
        wait([running], timeout=0.3)
    assert running.result().json == {"run": 1}
    assert runs(site, key) == 1


def test_a_step_of_a_view_runs_once_over_its_failures(site: Site) -> None:
    key = new_key()
    assert post(site, "stepping", key=key).status == 503
    assert post(site, "stepping", key=key).json == {"charged": 1}
    assert runs(site, key) == 1
