"""Rows of the outbox that somebody holds: a sweep passes them over, and is done when its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.sql.databases import KINDS
from tests.sql.outbox_support import Stage, ids, make_app

pytest.importorskip("django")

from django.db import connections

#: How a connection says that it waits for a lock no longer than this.
PATIENCE = {
    "postgresql": {"options": "-c lock_timeout=20ms"},
    "mariadb": {"init_command": "SET innodb_lock_wait_timeout = 1"},
    "sqlite": {"timeout": 0.05},
}

Open = Callable[[str], Stage]


@pytest.fixture
def open_stage(use_database: Callable[..., str]) -> Iterator[Open]:
    """A function that gives an outbox in a database of this vendor, where nobody waits long for a lock."""
    with ExitStack() as stack:

        def open_(vendor: str) -> Stage:
            alias = use_database(vendor, options=PATIENCE[vendor])
            return Stage(alias, stack.enter_context(closing(make_app(alias))))

        yield open_


class Sweeping:
    """A sweep in another thread, for it may never end."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._reports: list[Any] = []
        self._began = time.monotonic()
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._reports.append(self._stage.sweep())
        finally:
            connections[self._stage.alias].close()

    def report(self, seconds: float) -> Any:
        """Return its report; fail if that takes longer than this."""
        self._thread.join(self._began + seconds - time.monotonic())
        assert not self._thread.is_alive(), "it goes on and on"
        return self._reports[0]


class Lock:
    """The rows of these messages are somebody else's; on SQLite, so is the whole database."""

    def __init__(self, stage: Stage, *task_ids: str) -> None:
        self._stage, self._task_ids = stage, task_ids

    def __enter__(self) -> None:
        self._other = connections.create_connection(self._stage.alias)
        with self._other.cursor() as cursor:
            if self._other.vendor == "sqlite":
                cursor.execute("BEGIN IMMEDIATE")
                return
            cursor.execute("BEGIN")
            for each in self._task_ids:
                cursor.execute(
                    "SELECT id FROM celery_idempotent_outbox WHERE task_id = %s FOR UPDATE", [each]
                )

    def __exit__(self, *_: object) -> None:
        self._other.close()


@pytest.mark.parametrize("vendor", KINDS)
def test_a_sweep_leaves_what_is_locked_to_the_next(
    open_stage: Open, vendor: str, caplog: pytest.LogCaptureFixture
):
    stage = open_stage(vendor)
    staged = stage.dies_after_commit(1, 2)
    stage.pass_time()
    with Lock(stage, *staged):
        report = Sweeping(stage).report(seconds=10)
        assert (report.sent, report.failed, report.more) == (0, 0, True)
    (line,) = [each.getMessage() for each in caplog.records if "taken" in each.getMessage()]
    assert "2 messages" in line
    assert "lock" in line.lower()
    assert stage.sweep().sent == 2
    assert ids(stage.app) == staged


def test_locked_messages_however_many_hide_no_other(open_stage: Open):
    stage = open_stage("postgresql")
    locked = [stage.dies_after_commit(n)[0] for n in range(70)]
    stage.pass_time()
    (free,) = stage.dies_after_commit(70)
    stage.rows.filter(task_id=free).update(due_ms=1)
    with Lock(stage, *locked):
        assert Sweeping(stage).report(seconds=20).sent == 1
        assert ids(stage.app) == [free]
    assert stage.sweep().sent == 70
    assert ids(stage.app) == locked


def test_a_sweep_ends_with_its_budget_also_where_each_lock_costs_time(
    open_stage: Open, monkeypatch: pytest.MonkeyPatch
):
    from celery_idempotent.django import outbox

    stage = open_stage("sqlite")
    for number in range(100):
        stage.dies_after_commit(number)
    stage.pass_time()
    monkeypatch.setattr(outbox, "BUDGET_SECONDS", 0.3)
    with Lock(stage):
        assert Sweeping(stage).report(seconds=3).more
    assert len(stage.pending()) == 100
