"""With the records in the database a payment and its record are committed together, or not at all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.http.banks import Bank, at_work, made, open_bank
from tests.http.sites import ORDER, Answer, Site, Web, new_key
from tests.support.threads import in_background
from tests.support.waiting import wait_for

PAY = ("POST", "/payments/now/", ORDER)
Rows = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    with open_bank(tmp_path_factory.mktemp("bank")) as bank:
        yield bank


@pytest.fixture
def rows(bank: Bank) -> Rows:
    return bank.rows


@pytest.fixture
def doomed(bank: Bank) -> Iterator[Web]:
    """Another web server of the site, to be lost."""
    with bank.another() as web:
        yield web


def paid(answer: Answer) -> bool:
    return answer.status == 201


def repeat(site: Site, key: str) -> Answer:
    """Ask again until there is an answer."""
    return site.until(lambda: site.ask(*PAY, key=key), other_than=409)


def test_a_payment_and_its_record_are_committed_together(bank: Site, rows: Rows) -> None:
    key = new_key()
    with bank.bank("slow"):
        running = in_background(lambda: bank.ask(*PAY, key=key))
        wait_for(lambda: at_work(rows), 30)
        state = "SELECT state FROM celery_idempotent_record WHERE key = %s"
        assert rows.execute(state, (key,)).fetchone() == ("P",)
        assert made(rows, key) == 0
        assert bank.ask(*PAY, key=key).problem() == (409, "request_in_progress")
    assert paid(running.result(30))
    assert rows.execute(state, (key,)).fetchone() == ("C",)
    assert made(rows, key) == 1
    again = bank.ask(*PAY, key=key)
    assert (again.status, again.replayed, again.body) == (201, True, running.result().body)


def test_a_frozen_process_that_comes_back_too_late_pays_nothing_and_repeats_the_answer(
    bank: Site, doomed: Web, rows: Rows
) -> None:
    key = new_key()
    with bank.bank("slow"):
        frozen = in_background(lambda: doomed.ask(*PAY, key=key))
        wait_for(lambda: at_work(rows), 30)
        doomed.freeze()
    try:
        answer = repeat(bank, key)
        assert (answer.status, answer.replayed) == (201, False)
    finally:
        doomed.thaw()
    late = frozen.result(60)
    assert (late.status, late.replayed, late.body) == (201, True, answer.body)
    assert made(rows, key) == 1


def test_an_answer_of_5xx_rolls_the_payment_back(bank: Site, rows: Rows) -> None:
    key = new_key()
    path = "/t/broken/?status=500"
    answer = bank.ask("POST", path, b"", key=key, X_Caller="c")
    assert answer.status == 500
    assert made(rows, key) == 0
    path_again = bank.ask("POST", path, b"", key=key, X_Caller="c")
    assert (path_again.status, path_again.replayed) == (500, False)
    assert made(rows, key) == 0
    for status, kept in ((201, 1), (402, 1), (422, 1), (400, 0)):
        key = new_key()
        bank.ask("POST", f"/t/broken/?status={status}", b"", key=key, X_Caller="c")
        assert made(rows, key) == kept


def test_a_coroutine_is_part_of_the_transaction_too(bank: Site, rows: Rows) -> None:
    asgi = Web([sys.executable, "-m", "tests.http.servers"], bank.directory, bank.env, "asgi")
    bank.children.append(asgi)
    asgi.start()
    for status, kept in ((201, 1), (500, 0)):
        key = new_key()
        path = f"/t/abroken/?status={status}"
        assert asgi.ask("POST", path, b"", key=key, X_Caller="c").status == status
        assert made(rows, key) == kept
