"""Several processes write one SQLite file, and each key takes effect once."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from celery_idempotent.records import Claimed, State
from tests.sql import databases
from tests.sql.verbs import claim, end_of, named, renewal

pytest.importorskip("django")

from celery_idempotent.django.store import DjangoStore

KEYS = [named(f"order-{n}") for n in range(40)]


def work(store: DjangoStore, effects: Path) -> None:
    """Append a line for each key that this process gets."""
    for identity in random.sample(KEYS, len(KEYS)):
        answer = claim(store, identity)
        if isinstance(answer, Claimed):
            with effects.open("a") as file:
                file.write(f"{identity.key}\n")
            assert store.renew([renewal(answer.record)]) == [True]
            assert store.settle(end_of(answer.record))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_of_several_processes_one_gets_each_key(tmp_path: Path):
    # Its journal is as SQLite makes it: a reader and a writer shut each other out for a moment.
    with databases.fresh("sqlite", tmp_path, "processes"):
        store, effects = DjangoStore("processes"), tmp_path / "effects"
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
        assert sorted(effects.read_text().split()) == sorted(each.key for each in KEYS)
        found = [store.get(key) for key in KEYS]
        assert all(record is not None and record.state is State.COMPLETED for record in found)
