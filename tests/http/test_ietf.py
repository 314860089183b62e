"""The table of the specification, row by row, over a running server."""

from __future__ import annotations

from typing import Any

import pytest

from tests.http.sites import ORDER, Site, new_key
from tests.support.threads import all_at_once, in_background
from tests.support.waiting import wait_for

BOTH = pytest.mark.parametrize("path", ["/payments/", "/payments/now/"])
OTHER = {**ORDER, "amount": 101}


# Before the key is looked up: nothing is stored ----------------------------------------------------------------------


@BOTH
def test_what_is_refused_before_its_key_is_looked_up_leaves_that_free(
    site: Site, path: str
) -> None:
    """The key comes before the body, which is no payment; the table of keys is that of tests/http/test_parts.py."""
    key = new_key()
    missing = site.pay({"no": "payment"}, path=path)
    assert missing.problem() == (400, "idempotency_key_missing")
    assert missing.json["type"] == "https://docs.example/idempotency#idempotency_key_missing"
    assert 'rel="describedby"' in missing.headers["Link"]
    for wrong in ('"a', b"k" * 256, "schl\u00fcssel".encode(), ["a", "b"], ["same", "same"]):
        answer = site.pay({"no": "payment"}, path=path, key=wrong)
        assert answer.problem() == (400, "idempotency_key_invalid")
        assert answer.json["retryable"] is False
    nobody = site.pay(path=path, key=key, user=None)
    assert nobody.problem() == (401, "not_authenticated")
    assert nobody.headers["WWW-Authenticate"].startswith("Basic")
    for body in ({}, {**ORDER, "amount": 0}, {**ORDER, "recipient": "x"}, [1]):
        assert site.pay(body, path=path, key=key).problem()[0] == 400
    answer = site.ask("POST", path, b"{", key=key, content_type="application/json")
    assert answer.problem()[0] == 400
    first = site.pay(path=path, key=key)
    assert first.status in {201, 202}
    assert not first.replayed


def test_a_function_reads_the_key_before_the_caller_and_a_handler_of_the_framework_after(
    site: Site,
) -> None:
    asked: dict[str, Any] = {"path": "/t/plain/", "user": None, "key": "a b"}
    assert site.pay(**asked).problem() == (400, "idempotency_key_invalid")
    assert site.pay(**{**asked, "key": new_key()}).problem() == (403, "caller_unknown")
    assert site.pay(user=None, key="a b").problem() == (401, "not_authenticated")


# Mismatch, outstanding, replay ---------------------------------------------------------------------------------------


def test_the_first_post_is_202_with_its_status_and_the_last_one_200_with_the_result(
    site: Site,
) -> None:
    key = new_key()
    with site.bank("closed"):
        first = site.pay(key=f'"{key}"')
        assert first.status == 202
        assert not first.replayed
        assert first.headers["Location"].endswith(f"/{key}")
        assert int(first.headers["Retry-After"]) >= 1
        assert first.json["state"] == "QUEUED"
        again = site.pay(key=key)  # a bare value is the same key
        assert again.status == 202
        assert again.replayed
        assert again.headers["Location"] == first.headers["Location"]
        refused = site.pay(OTHER, key=key)
        assert refused.problem() == (422, "idempotency_key_reused")
        assert refused.json["retryable"] is False
    done = site.settled(first)
    assert done["state"] == "COMPLETED"
    last = site.pay(key=key)
    assert last.status == 200
    assert last.replayed
    assert last.json["result"] == done["result"]
    assert site.pay(OTHER, key=key).problem() == (422, "idempotency_key_reused")
    assert site.payments(key) == 1


def test_while_a_view_works_the_second_request_is_409_and_then_a_replay_byte_for_byte(
    site: Site,
) -> None:
    key = new_key()
    with site.bank("closed"):
        running = in_background(lambda: site.pay(path="/payments/now/", key=key))
        outstanding = site.until(
            lambda: site.ask("GET", f"/idempotency/http/{key}"), other_than=404
        )
        assert outstanding.json["state"] == "PROCESSING"
        refused = site.pay(path="/payments/now/", key=key)
        assert refused.problem() == (409, "request_in_progress")
        assert refused.json["retryable"] is True
        assert int(refused.headers["Retry-After"]) >= 1
        other = site.pay(OTHER, path="/payments/now/", key=key)
        assert other.problem() == (422, "idempotency_key_reused")
    first = running.result(60)
    assert (first.status, first.replayed) == (201, False)
    second = site.pay(path="/payments/now/", key=key)
    assert (second.status, second.replayed) == (201, True)
    assert second.body == first.body
    for name in ("Content-Type", "Location"):
        assert second.headers[name] == first.headers[name]
    assert site.pay(OTHER, path="/payments/now/", key=key).problem() == other.problem()
    assert site.payments(key) == 1


@BOTH
def test_the_same_key_of_somebody_else_is_another_key(site: Site, path: str) -> None:
    key = new_key()
    alice, bob = site.pay(path=path, key=key), site.pay(OTHER, path=path, key=key, user="bob")
    for answer in (alice, bob):
        assert answer.status in {201, 202}
        assert not answer.replayed
    if alice.status == 202:
        site.settled(alice)
        wait_for(lambda: site.payments(key, "bob") == 1, 30)
    assert site.payments(key, "alice") == 1
    assert site.payments(key, "bob") == 1


# All at once ---------------------------------------------------------------------------------------------------------


def test_of_fifty_simultaneous_posts_one_pays_and_the_others_are_409_or_replays(site: Site) -> None:
    key = new_key()
    answers = all_at_once(50, lambda _: site.pay(path="/payments/now/", key=key))
    firsts = [answer for answer in answers if answer.status == 201 and not answer.replayed]
    assert len(firsts) == 1
    for answer in answers:
        if answer.status == 409:
            assert answer.problem() == (409, "request_in_progress")
        else:
            assert (answer.status, answer.body) == (201, firsts[0].body)
    assert site.payments(key) == 1


def test_of_fifty_simultaneous_posts_one_is_queued_and_all_are_202(site: Site) -> None:
    key = new_key()
    with site.bank("closed"):
        answers = all_at_once(50, lambda _: site.pay(key=key))
        assert {answer.status for answer in answers} == {202}
        assert [answer.replayed for answer in answers].count(False) == 1
        assert len({answer.headers["Location"] for answer in answers}) == 1
    site.settled(answers[0])
    assert site.payments(key) == 1


# Trouble -------------------------------------------------------------------------------------------------------------


def test_while_no_worker_works_it_is_202_and_the_status_says_queued(site: Site) -> None:
    key = new_key()
    site.worker.freeze()
    try:
        first = site.pay(key=key)
        assert first.status == 202
        for _ in range(3):
            told = site.status(first)
            assert (told.status, told.json["state"]) == (200, "QUEUED")
            assert "Retry-After" in told.headers
    finally:
        site.worker.thaw()
    assert site.settled(first)["state"] == "COMPLETED"
    assert site.payments(key) == 1
