"""Several processes write one SQLite file, and each key takes effect once."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.records import Identity, State
from tests.sql import databases
from tests.support.preloaded import spawn
from tests.support.workers import child_environment

pytest.importorskip("django")


from celery_idempotent.django.store import DjangoStore

COUNT = 40


def test_of_several_processes_one_gets_each_key(
    sql_databases: Callable[[str], Any], tmp_path: Path
):
    sql_databases("sqlite")
    with databases.database("sqlite", tmp_path) as settings:
        # Its journal is as SQLite makes it: a reader and a writer shut each other out for a moment.
        store = DjangoStore(databases.add_alias("processes", settings))
        databases.migrate(store.alias)
        command = [sys.executable, "-m", "tests.sql.writer", str(tmp_path), str(COUNT)]
        env = child_environment(
            {
                "DJANGO_SETTINGS_MODULE": "tests.sql.atomic_settings",
                # Django's own settings, but for the patience with a locked file.
                "ATOMIC_DATABASES": json.dumps({"default": settings}),
            }
        )
        with (tmp_path / "log").open("wb") as log:
            writers = [spawn(command, cwd=tmp_path, env=env, log=log) for _ in range(3)]
        ended = [writer.wait(100) for writer in writers]
        assert ended == [0, 0, 0], (tmp_path / "log").read_text()
        keys = [f"order-{n}" for n in range(COUNT)]
        assert sorted((tmp_path / "effects").read_text().split()) == sorted(keys)
        found = [store.get(Identity(namespace="charge", key=key)) for key in keys]
        assert all(record is not None and record.state is State.COMPLETED for record in found)
        store.close()
        databases.drop_alias(store.alias)
