"""The table of the specification, row by row, over a running server, from the request to the task and to its status."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.records import Identity
from celery_idempotent.stores import Store, open_store
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
        outstanding = site.web.until(
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


PAY = "testproject.payments.tasks.pay"


def order(recipient: str) -> dict[str, Any]:
    return {**ORDER, "recipient": recipient}


def user_id(site: Site, name: str = "alice") -> int:
    with closing(sqlite3.connect(site.directory / "db.sqlite3")) as database:
        ((found,),) = database.execute("SELECT id FROM auth_user WHERE username = ?", (name,))
    return int(found)


@pytest.fixture
def producer(site: Site) -> Iterator[Celery]:
    """A program that knows the name of the task, and nothing else of the project."""
    app = Celery("elsewhere", broker=site.redis.url(), set_as_current=False)
    yield app
    app.close()


@pytest.fixture
def store(site: Site) -> Iterator[Store]:
    found = open_store(site.redis.url())
    yield found
    found.close()


def identity(site: Site, key: str) -> Identity:
    return Identity(
        namespace=PAY, scope=json.dumps(["user", user_id(site)], separators=(",", ":")), key=key
    )


# Failures ------------------------------------------------------------------------------------------------------------


def test_a_failure_that_may_pass_is_told_without_its_text_and_a_repetition_runs_anew(
    site: Site,
) -> None:
    key = new_key()
    first = site.pay(order("acct_unreachable"), key=key)
    told = site.settled(first)
    assert (told["state"], told["retryable"]) == ("FAILED", True)
    assert told["error"]["type"] == "BankUnreachable"
    assert "bank.internal" not in site.status(first).body.decode()
    assert site.pay(key=key).problem() == (422, "idempotency_key_reused")
    with site.bank("back"):
        again = site.pay(order("acct_unreachable"), key=key)
        assert (again.status, again.replayed) == (202, False)
        assert site.settled(again)["state"] == "COMPLETED"
    assert site.payments(key) == 1


def test_of_many_who_try_a_failure_again_at_once_one_is_queued(site: Site, store: Store) -> None:
    key = new_key()
    site.settled(site.pay(order("acct_unreachable"), key=key))
    with site.bank("closed"):
        answers = all_at_once(12, lambda _: site.pay(order("acct_unreachable"), key=key))
        assert {answer.status for answer in answers} == {202}
        assert [answer.replayed for answer in answers].count(False) == 1
        site.mood("back")
        assert site.settled(answers[0])["state"] == "COMPLETED"
    assert site.payments(key) == 1
    record = store.get(identity(site, key))
    assert record is not None
    assert record.attempts == 1


# One key for all -----------------------------------------------------------------------------------------------------


def test_a_program_that_publishes_with_the_key_of_a_request_is_a_duplicate(
    site: Site, producer: Celery, store: Store
) -> None:
    key, user = new_key(), user_id(site)
    site.settled(site.pay(key=key))
    sent = producer.send_task(
        PAY,
        kwargs={"payer": user, **ORDER},
        headers={"idempotency_key": key, "idempotency_scope": ["user", user]},
    )
    log = f"{PAY}[{sent.id}] succeeded"
    wait_for(lambda: log in site.worker.log, 30, lambda: site.worker.tail())
    assert site.payments(key) == 1


# The status resource -------------------------------------------------------------------------------------------------


def test_the_status_is_of_the_caller_alone(site: Site) -> None:
    key = new_key()
    first = site.pay(key=key)
    site.settled(first)
    assert site.status(first, user="bob").problem() == (404, "unknown_key")
    unknown = site.ask("GET", f"/idempotency/{PAY}/{new_key()}")
    assert unknown.problem() == (404, "unknown_key")
    foreign = site.status(first, user="bob")
    assert foreign.body == unknown.body, "a foreign key is an unknown one, word for word"
    assert site.status(first, user=None).problem()[0] == 401
    assert site.ask("GET", f"/idempotency/no.such.task/{key}").problem()[0] == 404
    assert site.ask("POST", first.headers["Location"], {}).status == 405


def test_the_status_has_an_etag_while_it_stays_the_same(site: Site) -> None:
    with site.bank("closed"):
        first = site.pay(key=new_key())
        wait_for(lambda: site.status(first).json["state"] == "PROCESSING", 30)
        running = site.status(first)
        assert int(running.headers["Retry-After"]) >= 1
        same = site.status(first, If_None_Match=running.headers["ETag"])
        assert (same.status, same.body) == (304, b"")
    site.settled(first)
    done = site.status(first, If_None_Match=running.headers["ETag"])
    assert done.status == 200
    assert done.headers["Retry-After"] is None
    assert done.headers["ETag"] != running.headers["ETag"]
    assert "private" in done.headers["Cache-Control"]


@pytest.mark.parametrize("key", ["a b?c#d%2F", "~1~0", "17", '\\"', "a%00b"])
def test_the_address_of_a_status_holds_a_key(site: Site, key: str) -> None:
    key += new_key()
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')
    first = site.pay(key=f'"{escaped}"')
    assert first.status in {200, 202}
    assert site.status(first).json["key"] == key


@pytest.mark.parametrize("key", ["a/b", "..", "."])
def test_a_key_that_no_path_can_have_has_no_address(site: Site, key: str) -> None:
    answer = site.pay(key=key if "." in key else key + new_key())
    assert answer.status in {200, 202}
    assert answer.json["url"] is None
    assert not {"Location", "Content-Location"} & set(answer.headers)
