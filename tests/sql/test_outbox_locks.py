"""Rows of the outbox that another connection holds: a sweep passes them over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from tests.sql.databases import VENDORS
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


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_sweep_leaves_what_is_locked_to_the_next(
    open_stage: Open, vendor: str, caplog: pytest.LogCaptureFixture
):
    stage = open_stage(vendor)
    staged = stage.dies_after_commit(1, 2)
    stage.pass_time()
    with Lock(stage, *staged):
        assert stage.sweep() == (0, 0)
    (line,) = [each.getMessage() for each in caplog.records if "left to" in each.getMessage()]
    assert "2 messages" in line
    assert "lock" in line.lower()
    assert stage.sweep()[0] == 2
    assert ids(stage.app) == staged
