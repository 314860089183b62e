"""Views on a server: who calls, who waits, a lease, a step."""

from __future__ import annotations

from concurrent.futures import wait
from typing import Any

from tests.http.sites import Answer, Site, at_once, in_background, new_key
from tests.support.waiting import wait_for


def post(web: Any, name: str, body: Any = None, *, key: str | None, **headers: Any) -> Answer:
    headers.setdefault("X_Caller", "carol")
    answer: Answer = web.ask(
        "POST", f"/t/{name}/", b"" if body is None else body, key=key, **headers
    )
    return answer


def runs(site: Site, key: str) -> int:
    path = site.directory / f"runs-{key}"
    return path.stat().st_size if path.exists() else 0


def test_in_the_rest_framework_the_caller_is_who_it_authenticated(site: Site) -> None:
    name, key = "rest_inside", new_key()
    assert post(site, name, {}, key=key, user="alice").status < 300
    assert post(site, name, {}, key=key, user="bob").replayed is False
    assert post(site, name, {}, key=key, user=None).problem()[0] == 401
    assert runs(site, key) == 2


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
