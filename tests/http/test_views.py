"""Views of every kind take effect once for each key, and their answers are repeated as they were, or not at all."""

from __future__ import annotations

import http.client
import os
import sys
from concurrent.futures import wait
from typing import Any

import pytest

from celery_idempotent.records import Claimed, ClaimRequest, Identity
from celery_idempotent.stores import open_store
from tests.http.sites import ORDER, Answer, Site, Web, at_once, in_background, new_key
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


@pytest.mark.parametrize("status", [400, 401, 403, 413, 429, 500, 502, 503])
def test_an_answer_that_invites_another_try_is_not_kept(site: Site, status: int) -> None:
    key = new_key()
    assert (
        site.ask("POST", f"/t/status/?status={status}", b"", key=key, X_Caller="c").status == status
    )
    again = site.ask("POST", f"/t/status/?status={status}", b"", key=key, X_Caller="c")
    assert (again.status, again.replayed, again.json) == (200, False, {"run": 2})


@pytest.mark.parametrize("status", [200, 204, 302, 402, 404, 409, 422])
def test_any_other_answer_is_kept(site: Site, status: int) -> None:
    key = new_key()
    path = f"/t/status/?status={status}"
    first, again = (site.ask("POST", path, b"", key=key, X_Caller="c") for _ in range(2))
    assert (first.status, again.status) == (status, status)
    assert (again.replayed, again.body) == (True, first.body)


def test_a_stream_is_sent_once_and_its_repetition_is_410(site: Site, web: Web) -> None:
    key = new_key()
    first, again = (post(web, "stream", key=key) for _ in range(2))
    assert first.body == b"1a1b1c"
    assert again.problem() == (410, "result_not_kept")
    assert runs(site, key) == 1


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


def test_when_the_process_of_a_view_is_killed_the_key_is_free_after_its_lease(site: Site) -> None:
    key = new_key()
    command = [sys.executable, "-m", "testproject.web", "0"]
    doomed = Web(command, site.directory, site.env, "doomed")
    site.children.append(doomed)
    doomed.start()
    pay = ("POST", "/payments/now/", ORDER)
    with site.bank("closed"):
        lost = in_background(lambda: doomed.ask(*pay, key=key))
        wait_for(lambda: site.ask("GET", f"/idempotency/http/{key}").status == 200, 30)
        doomed.kill()
        assert isinstance(lost.exception(30), OSError | http.client.HTTPException)
        assert site.ask(*pay, key=key).problem() == (409, "request_in_progress")
    answer = site.until(lambda: site.ask(*pay, key=key), other_than=409)
    assert (answer.status, answer.replayed) == (201, False)
    assert site.ask("GET", f"/idempotency/http/{key}").json["crashes"] == 1
    assert site.payments(key) == 1


def test_a_request_that_keeps_killing_its_process_is_given_up(site: Site) -> None:
    key = new_key()
    store = open_store(site.redis.url())
    identity = Identity(namespace="http", scope="carol", key=key)

    def die() -> bool:
        answer = store.claim(
            ClaimRequest(identity=identity, attempt=os.urandom(8), lease_ms=1, keep_ms=60_000)
        )
        return isinstance(answer, Claimed)

    for _ in range(5):
        wait_for(die)
    store.close()
    answer = post(site, "plain", key=key)
    assert answer.problem() == (500, "too_many_crashes")
    assert answer.json["retryable"] is False
    assert runs(site, key) == 0
