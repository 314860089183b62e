"""docs/recipes.md: each example with workers that are frozen and killed, and effects counted outside of them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.beat import Scheduler

from celery_idempotent import IdempotentTask, get_store
from celery_idempotent.celery.sweep import SWEEP
from celery_idempotent.testing import crash_matrix, isolated_records
from tests.docs import recipes_app
from tests.support.apps import close_app
from tests.support.ledger import LEDGER_VARIABLE, Ledger
from tests.support.pages import block, load
from tests.support.paths import ROOT
from tests.support.servers import embedded_redis
from tests.support.waiting import wait_for
from tests.support.workers import Worker, freeze

PATIENCE = 60
LEASE = 2

PAY = "recipes_two_providers.pay"


@dataclass
class World:
    """The app, its worker, and what is outside of both."""

    app: Celery
    worker: Worker
    ledger: Ledger
    directory: Path

    def query(self, statement: str, *values: Any) -> list[Any]:
        with contextlib.closing(recipes_app.connect(self.directory)) as db:
            return db.execute(statement, values).fetchall()

    def effects(self, provider: str, subject: str) -> int:
        """Return how often a provider did something."""
        ((count,),) = self.query(
            "SELECT count(*) FROM effect WHERE provider = ? AND subject = ?", provider, subject
        )
        return int(count)

    def calls(self, provider: str, subject: str) -> int:
        """Return how often a provider was asked to."""
        return self.ledger.count(provider, subject)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("recipes")
    ledger = Ledger(directory / "ledger.jsonl")
    with embedded_redis() as server:
        settings = {
            "broker_url": server.url(1),
            "result_backend": server.url(1),
            "task_default_queue": "recipes",
            "worker_prefetch_multiplier": 1,
            "broker_connection_retry_on_startup": True,
            "idempotency_lease": LEASE,
        }
        env = {
            recipes_app.SETTINGS_VARIABLE: json.dumps(settings),
            LEDGER_VARIABLE: str(ledger.path),
        }
        worker = Worker("tests.docs.recipes_app", directory=directory, concurrency=3, env=env)
        app = recipes_app.make_app(settings, directory)
        try:
            worker.start(timeout=60)
            yield World(app, worker, ledger, directory)
        finally:
            worker.kill()
            get_store(app).close()
            close_app(app)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show the end of the worker's log with a failure."""
    report: pytest.TestReport = yield
    world = getattr(item, "funcargs", {}).get("world")
    if report.failed and world is not None:
        report.sections.append(("log of the worker", world.worker.tail(80)))
    return report


class TestFencedWrite:
    def test_a_frozen_worker_does_not_overwrite_what_another_wrote_since(self, world: World):
        name, balance = "recipes_fenced_write.refresh", world.directory / "balance alice"
        world.query("INSERT INTO account VALUES ('alice', 0, 0)")
        balance.write_text("100")
        gate = world.directory / "closed 100 alice"
        gate.touch()
        late = world.app.tasks[name].delay("alice")
        wait_for(lambda: world.ledger.count("asked", "alice"), PATIENCE, "the bank to be asked")
        (entry,) = world.ledger.entries("asked", "alice")
        freeze(entry.pid)
        try:
            balance.write_text("250")
            newer = world.app.tasks[name].delay("alice")
            assert newer.get(timeout=PATIENCE) == "written"
            ((_, fence),) = world.query("SELECT balance, fence FROM account WHERE id = 'alice'")
            assert fence > 0
        finally:
            os.kill(entry.pid, signal.SIGCONT)
        gate.unlink()
        # Refused twice: its write by the database, and its result by the store. It runs again.
        assert late.get(timeout=PATIENCE)
        ((found, latest),) = world.query("SELECT balance, fence FROM account WHERE id = 'alice'")
        assert found == 250
        assert latest >= fence


class TestProviderKey:
    def test_a_charge_that_was_not_recorded_is_not_made_twice(self, world: World):
        (world.directory / "kill after charge order-1").touch()
        charge = world.app.tasks["recipes_provider_key.charge"]
        paid = charge.delay("order-1", 1999).get(timeout=PATIENCE)
        assert world.ledger.count("died", "order-1") == 1
        assert world.calls("charge", "order-1") == 2
        assert world.effects("charge", "order-1") == 1
        assert charge.delay("order-1", 1999).get(timeout=PATIENCE) == paid


class TestTwoProviders:
    def test_a_payment_survives_a_kill_at_any_line(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setenv(LEDGER_VARIABLE, str(world.ledger.path))
        with isolated_records(world.app):
            report = crash_matrix(
                world.app.tasks[PAY],
                arguments=lambda order: [order, 1999],
                effects=lambda order: (
                    10 * world.effects("charge", order) + world.effects("receipt", order)
                ),
            )
        assert (report.ok, report.expected) == (True, 11), "one of each"
        assert len(report.places) > 10


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


def test_every_example_of_the_pages_is_run():
    titles = {
        "recipes": [
            "fenced write",
            "provider key",
            "two providers",
            "webhook",
            "bulk mail",
            "slot",
        ],
        "deploying": ["observe", "sweep on a queue of its own", "test_keys.py"],
    }
    for name, wanted in titles.items():
        found = re.findall(r"^ *```python\n *# (.*)$", page(name), flags=re.MULTILINE)
        assert found == wanted
        assert all(block(name, title) for title in wanted)


class TestWithoutAWorker:
    @pytest.fixture
    def app(self) -> Iterator[Celery]:
        app = own_celery("eager", broker="memory://", backend="cache+memory://")
        app.conf.update(idempotency_store="memory://", task_always_eager=True)
        yield app
        app.close()

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
