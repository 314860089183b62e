"""The site with its records in PostgreSQL, behind a cache and alone: the important rows of the table, and what is lost.

The rows are those of test_ietf.py, word for word; here they meet the stores that it does not run on.
"""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from tests.http.banks import Bank, at_work, made, open_bank, sweep_until
from tests.http.sites import ORDER, Answer, Site, Web, in_background, new_key
from tests.http.test_ietf import (  # noqa: F401  collected here, with the sites of this module
    test_another_body_is_422_while_the_first_is_at_work_and_afterwards,
    test_of_fifty_simultaneous_posts_one_is_queued_and_all_are_202,
    test_of_fifty_simultaneous_posts_one_pays_and_the_others_are_409_or_replays,
    test_the_first_post_is_202_with_its_status_and_the_last_one_200_with_the_result,
    test_the_same_key_of_somebody_else_is_another_key,
    test_while_a_view_works_the_second_request_is_409_and_then_a_replay_byte_for_byte,
    test_while_no_worker_works_it_is_202_and_the_status_says_queued,
)
from tests.support.waiting import wait_for

NOW, LATER = "/payments/now/", "/payments/"
PAY = "testproject.payments.tasks.pay"


@pytest.fixture(scope="module", params=["hybrid", pytest.param("sql", marks=pytest.mark.wide)])
def bank(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Bank]:
    hybrid = request.param == "hybrid"
    with open_bank(tmp_path_factory.mktemp("bank"), hybrid=hybrid) as bank:
        yield bank


@pytest.fixture
def site(bank: Bank) -> Iterator[Site]:
    """What the rows of the table call it."""
    yield bank
    bank.mood(None)


@pytest.fixture
def doomed(bank: Bank) -> Iterator[Web]:
    """Another web server of the site, to be lost."""
    with bank.another() as web:
        yield web


def state_of(bank: Bank, answer: Answer) -> str:
    return str(bank.status(answer).json["state"])


# Killed --------------------------------------------------------------------------------------------------------------


def staged(bank: Bank, key: str) -> int:
    """Count the messages that are committed and not sent."""
    found = bank.rows.execute(
        "SELECT count(*) FROM celery_idempotent_outbox WHERE key = %s", (key,)
    )
    row = found.fetchone()
    assert row is not None
    return int(row[0])


def reserved(bank: Bank, key: str) -> bool:
    found = bank.rows.execute("SELECT 1 FROM celery_idempotent_record WHERE key = %s", (key,))
    return found.fetchone() is not None


def later(bank: Bank, key: str) -> None:
    """Let the minute pass for which a sweep leaves a message to who staged it."""
    bank.rows.execute(
        "UPDATE celery_idempotent_outbox SET due_ms = due_ms - 60000 WHERE key = %s", (key,)
    )


def lose(doomed: Web, lost: Any) -> None:
    doomed.kill()
    assert isinstance(lost.exception(30), (OSError, http.client.HTTPException))


def test_a_process_that_is_killed_between_its_commit_and_the_sending_loses_no_message(
    bank: Bank, doomed: Web
) -> None:
    key, held = new_key(), bank.proxy.held
    bank.proxy.hold_requests(b"LPUSH", times=None)
    try:
        lost = in_background(lambda: doomed.ask("POST", LATER, ORDER, key=key))
        wait_for(lambda: bank.proxy.held > held and staged(bank, key) == 1, 30)
        lose(doomed, lost)
        # The message itself is lost with the process.
        bank.proxy.cut()
    finally:
        bank.proxy.heal()
    again = bank.ask("POST", LATER, ORDER, key=key)
    assert (again.status, again.replayed, state_of(bank, again)) == (202, True, "QUEUED")
    assert made(bank.rows, key) == 0
    later(bank, key)
    sweep_until(bank, lambda: made(bank.rows, key) == 1)
    assert staged(bank, key) == 0
    assert bank.settled(again)["state"] == "COMPLETED"


def test_a_process_that_is_killed_before_its_commit_has_sent_nothing_and_a_repeat_runs_anew(
    bank: Bank, doomed: Web
) -> None:
    key = new_key()
    ask = ("POST", "/t/announcing/", ORDER)
    with bank.bank("slow"):
        lost = in_background(lambda: doomed.ask(*ask, key=key, X_Caller="c"))
        wait_for(lambda: at_work(bank.rows), 30)
        lose(doomed, lost)
    assert made(bank.rows, key) == staged(bank, f"after-{key}") == 0
    again = bank.until(lambda: bank.ask(*ask, key=key, X_Caller="c"), other_than=409)
    assert (again.status, again.replayed) == (201, False)
    wait_for(lambda: made(bank.rows, f"after-{key}") == 1, 30)
    assert made(bank.rows, key) == 1


def test_a_request_that_is_killed_before_its_commit_has_queued_nothing_and_a_repeat_does(
    bank: Bank, doomed: Web
) -> None:
    """Its reservation outlives the transaction by two seconds, and is no 202 for a payment that nobody makes."""
    key = new_key()
    ask = ("POST", "/t/hesitating/", ORDER)
    with bank.bank("slow"):
        lost = in_background(lambda: doomed.ask(*ask, key=key))
        wait_for(lambda: reserved(bank, key), 30)
        assert bank.ask("GET", f"/idempotency/{PAY}/{key}").problem() == (404, "unknown_key")
        lose(doomed, lost)
    assert staged(bank, key) == 0

    def queued() -> bool:
        answer = bank.ask(*ask, key=key)
        if answer.status == 409:
            assert answer.problem() == (409, "request_in_progress")
            return False
        assert (answer.status, answer.replayed) == (202, False)
        return True

    wait_for(queued, 30, "the end of the reservation")
    wait_for(lambda: made(bank.rows, key) == 1, 30)
    done = bank.until(lambda: bank.ask(*ask, key=key), other_than=202)
    assert (done.status, done.replayed) == (200, True)
    assert made(bank.rows, key) == 1
