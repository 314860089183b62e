"""Several processes write one SQLite file, and each key takes effect once."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Renewal,
    SettleRequest,
    State,
)
from tests.sql import databases

pytest.importorskip("django")

from celery_idempotent.django.store import DjangoStore

KEYS = [f"order-{n}" for n in range(40)]


def work(store: DjangoStore, effects: Path) -> None:
    """Append a line for each key that this process gets."""
    for key in random.sample(KEYS, len(KEYS)):
        identity = Identity(namespace="charge", key=key)
        asked: Any = {"lease_ms": 60_000, "keep_ms": 60_000}
        answer = store.claim(ClaimRequest(identity=identity, attempt=os.urandom(8), **asked))
        if isinstance(answer, Claimed):
            record = answer.record
            with effects.open("a") as file:
                file.write(f"{key}\n")
            assert store.renew([Renewal(identity=identity, token=record.token, **asked)]) == [True]
            end = {"state": State.COMPLETED, "value": None, "keep_ms": 60_000}
            assert store.settle(SettleRequest(record=record, **end))  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_of_several_processes_one_gets_each_key(
    sql_databases: Callable[[str], Any], tmp_path: Path
):
    sql_databases("sqlite")
    with databases.database("sqlite", tmp_path) as settings:
        # Its journal is as SQLite makes it: a reader and a writer shut each other out for a moment.
        alias = databases.add_alias("processes", settings)
        databases.migrate(alias)
        store, effects = DjangoStore(alias), tmp_path / "effects"
        store.connections.own().close()
        children = []
        for _ in range(3):
            if not (pid := os.fork()):
                status = 1
                try:
                    work(store, effects)
                    status = 0
                finally:
                    os._exit(status)
            children.append(pid)
        ended = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
        assert ended == [0, 0, 0]
        assert sorted(effects.read_text().split()) == sorted(KEYS)
        found = [store.get(Identity(namespace="charge", key=key)) for key in KEYS]
        assert all(record is not None and record.state is State.COMPLETED for record in found)
        databases.drop_alias(alias)
