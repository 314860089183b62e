"""From the request to the task under one key: its failures are told, its repetitions meet the same record."""

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
from tests.support.threads import all_at_once
from tests.support.waiting import wait_for

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
