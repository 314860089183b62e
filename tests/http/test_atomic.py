"""With the records in the database a payment and its record are committed together, or not at all."""

from __future__ import annotations

import http.client
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.http.sites import ORDER, Answer, Site, Web, at_once, in_background, new_key, open_site
from tests.support.servers import embedded_redis, need
from tests.support.waiting import wait_for

_SERVER = os.environ.get("CELERY_IDEMPOTENT_POSTGRESQL_URL", "postgresql://postgres@127.0.0.1:5432")
_SWEEP = """
import django
django.setup()
from celery_idempotent.django.outbox import sweep
from testproject.celery import app
app.loader.import_default_modules()
sweep(app)
"""
PAY = ("POST", "/payments/now/", ORDER)


def _connect(database: str) -> psycopg.Connection[Any] | None:
    try:
        return psycopg.connect(f"{_SERVER}/{database}", autocommit=True, connect_timeout=5)
    except psycopg.OperationalError:
        return None


@pytest.fixture(scope="module")
def database() -> Iterator[str]:
    """A PostgreSQL database of the tests' own."""
    server = _connect("postgres")
    need(server, "PostgreSQL")
    assert server is not None
    name = f"test_idempotent_http_{uuid.uuid4().hex[:12]}"
    server.execute(f"CREATE DATABASE {name}")  # type: ignore[call-overload]  # a name of our own
    try:
        yield name
    finally:
        server.execute(f"DROP DATABASE {name} WITH (FORCE)")  # type: ignore[call-overload]  # as above
        server.close()


@pytest.fixture(scope="module")
def bank(database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The site on that database, its records in it."""
    server = urlsplit(_SERVER)
    settings = {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": database,
        "HOST": server.hostname,
        "PORT": server.port or 5432,
        "USER": server.username or "postgres",
        "PASSWORD": server.password or "",
        "ATOMIC_REQUESTS": True,
    }
    env = {"TEST_DATABASE": json.dumps(settings), "IDEMPOTENCY_STORE": "django://"}
    directory = tmp_path_factory.mktemp("bank")
    with embedded_redis() as redis, open_site(directory, redis, env=env) as site:
        yield site


@pytest.fixture
def rows(database: str) -> Iterator[psycopg.Connection[Any]]:
    connection = _connect(database)
    assert connection is not None
    yield connection
    connection.close()


@pytest.fixture
def doomed(bank: Site) -> Iterator[Web]:
    """Another web server of the site, to be lost."""
    command = [sys.executable, "-m", "testproject.web", "0"]
    web = Web(command, bank.directory, bank.env, f"doomed-{new_key()}")
    bank.children.append(web)
    yield web.start()
    bank.mood(None)
    web.kill()


def made(rows: psycopg.Connection[Any], key: str) -> int:
    found = rows.execute("SELECT count(*) FROM payments_payment WHERE key = %s", (key,)).fetchone()
    return int(found[0]) if found else 0


def at_work(rows: psycopg.Connection[Any]) -> bool:
    """Has a payment been entered, and not yet committed?"""
    found = rows.execute(
        "SELECT 1 FROM pg_locks WHERE relation = 'payments_payment'::regclass AND mode = 'RowExclusiveLock'"
    )
    return found.fetchone() is not None


def paid(answer: Answer) -> bool:
    return answer.status == 201


def repeat(site: Site, key: str) -> Answer:
    """Ask again until there is an answer."""
    return site.until(lambda: site.ask(*PAY, key=key), other_than=409)


def test_a_payment_and_its_record_are_committed_together(
    bank: Site, rows: psycopg.Connection[Any]
) -> None:
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


def test_a_process_killed_between_its_write_and_its_commit_leaves_neither(
    bank: Site, doomed: Web, rows: psycopg.Connection[Any]
) -> None:
    key = new_key()
    with bank.bank("slow"):
        lost = in_background(lambda: doomed.ask(*PAY, key=key))
        wait_for(lambda: at_work(rows), 30)
        doomed.kill()
        assert isinstance(lost.exception(30), (OSError, http.client.HTTPException))
        assert made(rows, key) == 0
    answer = repeat(bank, key)
    assert (answer.status, answer.replayed) == (201, False)
    assert made(rows, key) == 1
    assert bank.ask("GET", f"/idempotency/http/{key}").json["crashes"] == 1


def test_a_frozen_process_that_comes_back_too_late_pays_nothing_and_repeats_the_answer(
    bank: Site, doomed: Web, rows: psycopg.Connection[Any]
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


def test_an_answer_of_5xx_rolls_the_payment_back(bank: Site, rows: psycopg.Connection[Any]) -> None:
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


def test_a_coroutine_is_part_of_the_transaction_too(
    bank: Site, rows: psycopg.Connection[Any]
) -> None:
    asgi = Web([sys.executable, "-m", "tests.http.asgi"], bank.directory, bank.env, "asgi")
    bank.children.append(asgi)
    asgi.start()
    for status, kept in ((201, 1), (500, 0)):
        key = new_key()
        path = f"/t/abroken/?status={status}"
        assert asgi.ask("POST", path, b"", key=key, X_Caller="c").status == status
        assert made(rows, key) == kept


def test_fifty_at_once_commit_one_payment(bank: Site, rows: psycopg.Connection[Any]) -> None:
    key = new_key()
    answers = at_once(lambda: bank.ask(*PAY, key=key), 50)
    assert {answer.status for answer in answers} <= {201, 409}
    assert [answer.replayed for answer in answers if paid(answer)].count(False) == 1
    assert made(rows, key) == 1


def test_what_a_rolled_back_request_queued_is_never_sent_and_may_be_asked_for_again(
    bank: Site, rows: psycopg.Connection[Any]
) -> None:
    """ATOMIC_REQUESTS: the reservation waits for the COMMIT that sends its message."""
    key = new_key()
    answer = bank.ask("POST", "/t/rolled-back/", ORDER, key=key)
    assert answer.status == 500
    unknown = f"/idempotency/testproject.payments.tasks.pay/{key}"
    wait_for(lambda: bank.ask("GET", unknown).status == 404, 5, "the reservation to be given back")
    committed = bank.pay(key=key)
    assert (committed.status, committed.replayed) == (202, False)
    bank.settled(committed)
    assert made(rows, key) == 1


def test_a_guard_inside_of_a_transaction_refuses_to_work(bank: Site) -> None:
    answer = bank.ask("POST", "/t/by-method/1/", b"", key=new_key(), X_Caller="c")
    assert answer.status == 500
    assert "runs inside a transaction" in bank.web.log.read_text()


def test_a_message_that_cannot_be_sent_waits_in_the_database_for_the_broker(
    bank: Site, rows: psycopg.Connection[Any]
) -> None:
    keys = {path: new_key() for path in ("/t/at-once/", "/payments/")}
    bank.proxy.refuse()
    try:
        answers = [bank.ask("POST", path, ORDER, key=key) for path, key in keys.items()]
        assert [answer.status for answer in answers] == [202, 202]
        for answer in answers:
            assert bank.status(answer).json["state"] == "QUEUED"
    finally:
        bank.proxy.heal()

    def sweep() -> bool:
        subprocess.run((sys.executable, "-c", _SWEEP), env=bank.env, check=True, timeout=60)
        return all(made(rows, key) for key in keys.values())

    wait_for(sweep, 60)
    for answer, key in zip(answers, keys.values(), strict=True):
        assert bank.settled(answer)["state"] == "COMPLETED"
        assert made(rows, key) == 1
