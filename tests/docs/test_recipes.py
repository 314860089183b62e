"""docs/recipes.md and docs/deploying.md: each example, with late or killed runs and effects counted outside of them."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.beat import Scheduler
from celery.signals import before_task_publish

from celery_idempotent import IdempotentTask
from celery_idempotent.celery.sweep import SWEEP
from celery_idempotent.testing import FakeClock, crash_matrix, deliver, isolated_records
from tests.support.apps import close_app
from tests.support.pages import block, load
from tests.support.paths import ROOT


@pytest.fixture
def app() -> Iterator[Celery]:
    app = own_celery("recipes", broker="memory://", backend="cache+memory://")
    yield app
    app.close()


def test_a_late_worker_does_not_overwrite_what_another_wrote_since(app: Celery):
    """::

    late     asks: 100 ───────────── its lease is over ──────────────────── write: refused
    newer                                              asks: 250 ─ write
    """
    db, clock, bank = sqlite3.connect(":memory:", isolation_level=None), FakeClock(), Mock()
    db.execute("CREATE TABLE account (id TEXT PRIMARY KEY, balance INT, fence BIGINT)")
    db.execute("INSERT INTO account VALUES ('alice', 0, 0)")
    given = {"bank": bank, "database": lambda: contextlib.nullcontext(db)}
    task = load(app, "recipes", "fenced write", given).refresh

    def late(account: str) -> int:
        bank.balance.side_effect = [250, 250]
        clock.advance(61_000)
        assert deliver(task, account).value == "written"
        return 100

    bank.balance.side_effect = late
    with isolated_records(app, clock=clock):
        # Refused twice: its write by the database, and its result by the store. Its message is delivered again.
        assert deliver(task, "alice").state != "FAILURE"
    assert db.execute("SELECT balance FROM account").fetchall() == [(250,)]
    db.close()


class Provider:
    """Takes effect once per key, in a file outside of every process that dies; given a key again, it repeats itself."""

    def __init__(self, file: Path, name: str) -> None:
        self.file, self.name = file, name

    def query(self, statement: str, *values: Any) -> Any:
        with contextlib.closing(sqlite3.connect(self.file, isolation_level=None)) as db:
            db.execute(
                "CREATE TABLE IF NOT EXISTS effect (key TEXT PRIMARY KEY, name, subject, answer)"
            )
            return db.execute(statement, values).fetchone()

    def charge(self, order_id: str, cents: object, *, idempotency_key: str) -> dict[str, Any]:
        answer = json.dumps({"cents": cents, "id": uuid.uuid4().hex})
        given = (idempotency_key, self.name, order_id, answer)
        self.query("INSERT OR IGNORE INTO effect VALUES (?, ?, ?, ?)", *given)
        (kept,) = self.query("SELECT answer FROM effect WHERE key = ?", idempotency_key)
        found: dict[str, Any] = json.loads(kept)
        return found

    send = charge

    def effects(self, subject: str) -> int:
        about = (self.name, subject)
        query = "SELECT count(*) FROM effect WHERE name = ? AND subject = ?"
        return int(self.query(query, *about)[0])


@pytest.mark.parametrize(
    ("title", "name", "expected", "places"),
    [("provider key", "charge", [1, 0], 2), ("two providers", "pay", [1, 1], 10)],
)
def test_a_payment_survives_a_kill_at_any_line(
    app: Celery, tmp_path: Path, title: str, name: str, expected: list[int], places: int
):
    both = [Provider(tmp_path / "world.sqlite", each) for each in ("charge", "receipt")]
    module = load(app, "recipes", title, {"provider": both[0], "mailer": both[1]})
    with isolated_records(app):
        report = crash_matrix(
            getattr(module, name),
            arguments=lambda order: [order, 1999],
            effects=lambda order: [each.effects(order) for each in both],
        )
    assert (report.ok, report.expected) == (True, expected)
    assert len(report.places) > places


class TestObserve:
    def test_the_settings_of_the_page_make_every_task_observe(self, request: pytest.FixtureRequest):
        module = load(Celery(set_as_current=False), "deploying", "observe", {"Celery": own_celery})
        app: Celery = module.app
        request.addfinalizer(app.close)

        @app.task(name="shop.charge", shared=False)
        def charge(order_id: str) -> None: ...

        task: Any = app.tasks["shop.charge"]
        assert IdempotentTask in type(task).__mro__
        assert task.idempotency_policy.mode == "observe"
        assert (task.acks_late, task.reject_on_worker_lost) == (False, False)

    def test_the_sweep_goes_where_the_page_sends_it(self, request: pytest.FixtureRequest):
        app = own_celery("observed", broker="memory://", backend="cache+memory://")
        request.addfinalizer(app.close)
        app.task(name="shop.charge", base=IdempotentTask, shared=False)(_nothing)
        load(app, "deploying", "sweep on a queue of its own", {})
        app.finalize()
        scheduler: Any = Scheduler(app)
        scheduler.setup_schedule()
        scheduler.apply_async(scheduler.schedule[SWEEP])
        with app.connection_for_read() as connection:
            queue: Any = app.amqp.queues["idempotency"].bind(connection.default_channel)
            assert queue.get().headers["task"] == SWEEP

    def test_the_line_of_the_page_is_the_line_of_the_log(
        self, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
    ):
        app = own_celery("observed", broker="memory://", backend="cache+memory://")
        request.addfinalizer(app.close)
        app.conf.update(idempotency_store="memory://", idempotency_mode="observe")

        @app.task(name="shop.charge", base=IdempotentTask, shared=False)
        def charge(order_id: str) -> None: ...

        task: Any = app.tasks["shop.charge"]
        for _ in range(2):
            task.apply(("order-17",), task_id="5d1c", idempotency_key="order-17")
        (told,) = re.findall(r"^ *(idempotency: observed: .*)$", page("deploying"), re.MULTILINE)
        assert shape(told) == next(shape(line) for line in caplog.messages)


def _nothing() -> None: ...


def own_celery(name: str, **settings: Any) -> Celery:
    """Return an app that is not the current one."""
    return Celery(name, set_as_current=False, **settings)


def page(name: str = "recipes") -> str:
    return (ROOT / "docs" / f"{name}.md").read_text()


def shape(line: str) -> str:
    """Return the words of a log line, without ids, keys and times."""
    line = re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", "TIME", line)
    line = re.sub(r"key \S+", "key KEY", line)
    return re.sub(r"task \S+", "task ID", line)


class TestWithoutAWorker:
    @pytest.fixture(autouse=True)
    def eager(self, app: Celery) -> None:
        app.conf.update(idempotency_store="memory://", task_always_eager=True)

    def test_an_event_that_is_delivered_again_is_booked_once(self, app: Celery):
        ledger = Mock(**{"book.return_value": "booked"})
        task = load(app, "recipes", "webhook", {"ledger": ledger}).handle
        event = {"id": "evt_1", "type": "paid", "data": {}, "attempt": 1}
        assert task.delay(event).get() == task.delay(event | {"attempt": 2}).get() == "booked"
        ledger.book.assert_called_once()

    def test_who_has_the_mail_gets_no_second_one(self, app: Celery):
        mailer = Mock(**{"send.side_effect": lambda _, each: each})
        send_all = load(app, "recipes", "bulk mail", {"mailer": mailer}).send_all
        assert send_all("may", ["ann", "bob"]).get() == ["ann", "bob"]
        assert send_all("may", ["ann", "bob", "eve"]).get() == ["ann", "bob", "eve"]
        assert mailer.send.call_count == 3

    def test_two_beats_make_one_report_of_a_slot(self, app: Celery):
        reports = Mock(**{"make.return_value": "made"})
        module = load(app, "recipes", "slot", {"reports": reports})
        vars(module)["datetime"] = clock = Mock()
        for minute, runs in ((59.9, 1), (60.1, 1), (74.9, 2), (75.0, 2)):
            clock.now.return_value.timestamp.return_value = minute * 60
            module.report.delay()
            assert reports.make.call_count == runs


SHOP = """
from celery import Celery
from celery_idempotent import IdempotentTask

app = Celery("shop", set_as_current=False)

@app.task(base=IdempotentTask, shared=False, name="shop.charge", {options})
def charge(order_id, amount, note=None): ...
"""


@pytest.mark.parametrize(
    ("options", "passes"),
    [
        ('idempotency_key="order_id"', True),
        ('idempotency_key=("order_id", "amount")', False),
        ('idempotency_key="order_id", idempotency_namespace="pay"', False),
        ('idempotency_key="order_id", idempotency_scope="amount"', False),
        ('idempotency_key="order_id", idempotency_fingerprint="order_id"', False),
    ],
)
def test_the_test_for_ci_passes_and_finds_a_change(monkeypatch, options, passes):
    shop: Any = ModuleType("shop")
    monkeypatch.setitem(sys.modules, "shop", shop)
    monkeypatch.setattr(before_task_publish, "receivers", [])
    exec(SHOP.format(options=options), vars(shop))
    page: dict[str, Any] = {}
    exec(block("deploying", "test_keys.py"), page)
    refused = pytest.raises(AssertionError, match=r"operations of shop.charge would run again")
    with contextlib.nullcontext() if passes else refused:
        page["test_no_key_changes"]()
    close_app(shop.app)
