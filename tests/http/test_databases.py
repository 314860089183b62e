"""The site with its records in PostgreSQL, behind a cache and alone: the rows of the table, and what is atomic."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.http.sites import ORDER, Site, Web, new_key, open_site
from tests.http.test_ietf import (  # noqa: F401  collected here, with the sites of this module
    test_of_fifty_simultaneous_posts_one_is_queued_and_all_are_202,
    test_of_fifty_simultaneous_posts_one_pays_and_the_others_are_409_or_replays,
    test_the_first_post_is_202_with_its_status_and_the_last_one_200_with_the_result,
    test_the_same_key_of_somebody_else_is_another_key,
    test_while_a_view_works_the_second_request_is_409_and_then_a_replay_byte_for_byte,
    test_while_no_worker_works_it_is_202_and_the_status_says_queued,
)
from tests.sql import databases
from tests.support.servers import embedded_redis, need
from tests.support.threads import in_background
from tests.support.waiting import wait_for


@dataclass(kw_only=True)
class Bank(Site):
    """A site whose records are in its database; ``rows`` looks at that from outside."""

    rows: psycopg.Connection[Any]

    def made(self, key: str) -> int:
        """Count the payments that are committed with a key."""
        sql = "SELECT count(*) FROM payments_payment WHERE key = %s"
        ((found,),) = self.rows.execute(sql, (key,)).fetchall()
        return int(found)

    def is_at_work(self) -> bool:
        """Has a payment been entered, and not yet committed?"""
        locks = "SELECT 1 FROM pg_locks WHERE relation = 'payments_payment'::regclass"
        found = self.rows.execute(f"{locks} AND mode = 'RowExclusiveLock'")
        return found.fetchone() is not None


@contextlib.contextmanager
def open_bank(directory: Path, *, hybrid: bool = False) -> Iterator[Bank]:
    """Start the site on a new database; each of its requests is a transaction there."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(databases.ready(directory))
        need(databases.available("postgresql"), "PostgreSQL")
        settings = stack.enter_context(databases.database("postgresql", directory))
        cache = stack.enter_context(embedded_redis()) if hybrid else None
        truth = f"hybrid+{cache.url()}?truth=default" if cache else "django://default"
        env = {
            "TEST_DATABASE": json.dumps({**settings, "ATOMIC_REQUESTS": True}),
            "IDEMPOTENCY_STORE": truth,
        }
        redis = stack.enter_context(embedded_redis())
        site = stack.enter_context(open_site(directory, redis, env=env))
        names = ("HOST", "PORT", "USER", "PASSWORD")
        where = {name.lower(): settings[name] for name in names}
        rows = psycopg.connect(dbname=settings["NAME"], autocommit=True, **where)
        stack.enter_context(rows)
        yield Bank(**vars(site), rows=rows)


PAY = ("POST", "/payments/now/", ORDER)


@pytest.fixture(scope="module")
def bank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    with open_bank(tmp_path_factory.mktemp("bank")) as bank:
        yield bank


@pytest.fixture(scope="module", params=["hybrid", pytest.param("sql", marks=pytest.mark.wide)])
def site(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Site]:
    """What the rows of the table call it, word for word; here they meet the stores that it does not run on."""
    if request.param == "sql":
        yield request.getfixturevalue("bank")
        return
    with open_bank(tmp_path_factory.mktemp("hybrid"), hybrid=True) as bank:
        yield bank


@pytest.fixture
def doomed(bank: Bank) -> Iterator[Web]:
    """Another web server of the site, to be lost."""
    command = [sys.executable, "-m", "testproject.web", "0"]
    web = Web(command, bank.directory, bank.env, f"another-{new_key()}")
    bank.children.append(web)
    yield web.start()
    bank.mood(None)
    web.kill()


def test_a_payment_and_its_record_are_committed_together(bank: Bank) -> None:
    key = new_key()
    with bank.bank("slow"):
        running = in_background(lambda: bank.ask(*PAY, key=key))
        wait_for(bank.is_at_work, 30)
        state = "SELECT state FROM celery_idempotent_record WHERE key = %s"
        assert bank.rows.execute(state, (key,)).fetchone() == ("P",)
        assert bank.made(key) == 0
        assert bank.ask(*PAY, key=key).problem() == (409, "request_in_progress")
    assert running.result(30).status == 201
    assert bank.rows.execute(state, (key,)).fetchone() == ("C",)
    assert bank.made(key) == 1
    again = bank.ask(*PAY, key=key)
    assert (again.status, again.replayed, again.body) == (201, True, running.result().body)


def test_a_frozen_process_that_comes_back_too_late_pays_nothing_and_repeats_the_answer(
    bank: Bank, doomed: Web
) -> None:
    key = new_key()
    with bank.bank("slow"):
        frozen = in_background(lambda: doomed.ask(*PAY, key=key))
        wait_for(bank.is_at_work, 30)
        doomed.freeze()
    try:
        answer = bank.web.until(lambda: bank.ask(*PAY, key=key), other_than=409)
        assert (answer.status, answer.replayed) == (201, False)
    finally:
        doomed.thaw()
    late = frozen.result(60)
    assert (late.status, late.replayed, late.body) == (201, True, answer.body)
    assert bank.made(key) == 1


def test_an_answer_of_5xx_rolls_the_payment_back(bank: Bank) -> None:
    key = new_key()
    path = "/t/broken/?status=500"
    answer = bank.ask("POST", path, b"", key=key, X_Caller="c")
    assert answer.status == 500
    assert bank.made(key) == 0
    path_again = bank.ask("POST", path, b"", key=key, X_Caller="c")
    assert (path_again.status, path_again.replayed) == (500, False)
    assert bank.made(key) == 0
    for status, kept in ((201, 1), (402, 1), (422, 1), (400, 0)):
        key = new_key()
        bank.ask("POST", f"/t/broken/?status={status}", b"", key=key, X_Caller="c")
        assert bank.made(key) == kept


def test_a_coroutine_is_part_of_the_transaction_too(bank: Bank) -> None:
    asgi = Web(
        [sys.executable, "-m", "tests.http.frameworks", "site"], bank.directory, bank.env, "asgi"
    )
    bank.children.append(asgi)
    asgi.start()
    for status, kept in ((201, 1), (500, 0)):
        key = new_key()
        path = f"/t/abroken/?status={status}"
        assert asgi.ask("POST", path, b"", key=key, X_Caller="c").status == status
        assert bank.made(key) == kept
