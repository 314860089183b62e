"""Who could not have a key is noted where no holder meets it, at every isolation level."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Intervention,
    Mismatched,
    Record,
    SettleRequest,
    State,
)
from tests.contract.base import FINGERPRINT, OTHER_FINGERPRINT, VALUE
from tests.sql.databases import execute, rows, shift
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django.store import DjangoStore

KEY = Identity(namespace="charge", key="order-17")
EVERYWHERE = [
    (vendor, level)
    for vendor in ("postgresql", "mariadb")
    for level in ("read committed", "repeatable read", "serializable")
] + [("sqlite", "")]
NOTES = "SELECT digest FROM celery_idempotent_refusals"


def claim(store: DjangoStore, **changes: Any) -> Any:
    asked = {"attempt": os.urandom(8), "lease_ms": 60_000, "keep_ms": 60_000, **changes}
    return store.claim(ClaimRequest(identity=KEY, **{"fingerprint": FINGERPRINT, **asked}))


def claimed(store: DjangoStore) -> Record:
    answer = claim(store)
    assert isinstance(answer, Claimed)
    return answer.record


def settle(store: DjangoStore, record: Record) -> bool:
    return store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=60_000)
    )


def noted(store: DjangoStore) -> list[str]:
    found = store.get(KEY)
    assert found is not None
    return [refusal.task_id for refusal in found.refusals]


class Storm:
    """Threads that ask for the key until the block ends."""

    def __init__(self, store: DjangoStore) -> None:
        self.store, self.stopped = store, threading.Event()
        self.answers: list[Any] = []
        self.slowest = 0.0
        self.threads = [threading.Thread(target=self.ask, args=(n,)) for n in range(3)]

    def ask(self, number: int) -> None:
        try:
            while not self.stopped.is_set():
                started = time.monotonic()
                self.answers.append(claim(self.store, task_id=f"task-{number}"))
                self.slowest = max(self.slowest, time.monotonic() - started)
        except BaseException as error:
            self.answers.append(error)
            raise
        finally:
            connections.close_all()

    def __enter__(self) -> Storm:
        for thread in self.threads:
            thread.start()
        self.more(6)
        return self

    def more(self, count: int) -> None:
        """Wait for so many more answers."""
        wanted = len(self.answers) + count
        wait_for(
            lambda: len(self.answers) >= wanted or not any(t.is_alive() for t in self.threads),
            what="refusals",
        )

    def __exit__(self, *_: object) -> None:
        self.stopped.set()
        for thread in self.threads:
            thread.join(30)


@pytest.mark.parametrize(("vendor", "level"), EVERYWHERE)
def test_no_conflict_disturbs_a_settle_in_the_tasks_transaction(
    open_store: Callable[..., DjangoStore], vendor: str, level: str
):
    store = open_store(vendor, level)
    record = claimed(store)
    with store.transaction(record) as run, Storm(store) as storm:
        assert rows(store.alias, "SELECT 1") == [(1,)]
        assert run.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=60_000)
        )
        storm.more(6)
    assert all(isinstance(answer, Held) for answer in storm.answers), storm.answers
    found = store.get(KEY)
    assert found is not None
    assert (found.state, found.value, found.token) == (State.COMPLETED, VALUE, record.token)
    # SQLite has one writer, and a note does not wait for it.
    assert len(found.refusals) >= (0 if vendor == "sqlite" else 1)
    assert storm.slowest < 5


@pytest.mark.parametrize(("vendor", "level"), EVERYWHERE)
def test_no_note_touches_what_a_holder_writes_on_condition(
    open_store: Callable[..., DjangoStore], vendor: str, level: str
):
    store = open_store(vendor, level)
    record = claimed(store)
    versions = (
        "SELECT r.version, l.version FROM celery_idempotent_record r, celery_idempotent_lease l"
    )
    before = rows(store.alias, versions)
    assert isinstance(claim(store, task_id="a"), Held)
    assert isinstance(claim(store, task_id="b", fingerprint=OTHER_FINGERPRINT), Mismatched)
    assert rows(store.alias, versions) == before
    assert settle(store, record)
    version = "SELECT version FROM celery_idempotent_record"
    before = rows(store.alias, version)
    assert isinstance(claim(store, task_id="c", fingerprint=OTHER_FINGERPRINT), Mismatched)
    assert rows(store.alias, version) == before
    assert noted(store) == ["a", "b", "c"]


@pytest.mark.parametrize("vendor", ["postgresql", "mariadb", "sqlite"])
def test_a_task_without_a_refusal_has_no_row(open_store: Callable[..., DjangoStore], vendor: str):
    store = open_store(vendor)
    settle(store, claimed(store))
    assert isinstance(claim(store), object)
    assert rows(store.alias, NOTES) == []


@pytest.mark.parametrize("vendor", ["postgresql", "mariadb", "sqlite"])
@pytest.mark.parametrize("end", ["prune", "forget"])
def test_notes_go_with_their_record(open_store: Callable[..., DjangoStore], vendor: str, end: str):
    store = open_store(vendor)
    record = claimed(store)
    claim(store, task_id="another")
    assert len(rows(store.alias, NOTES)) == 1
    if end == "prune":
        settle(store, record)
        shift(store, 10_000_000)
        assert store.prune(limit=10) == 1
    else:
        assert store.forget(KEY)
    assert rows(store.alias, NOTES) == []


def test_on_sqlite_a_refusal_does_not_wait_for_the_writer(open_store: Callable[..., DjangoStore]):
    store = open_store("sqlite")
    record = claimed(store)
    answers: list[Any] = []

    def ask() -> None:
        started = time.monotonic()
        answers.append((claim(store, task_id="another"), time.monotonic() - started))
        # What is set for the note alone would hurt whoever writes next.
        answers.append(rows(store.alias, "PRAGMA busy_timeout"))
        connections.close_all()

    before = rows(store.alias, "PRAGMA busy_timeout")
    with store.transaction(record) as run:
        execute(store.alias, "UPDATE celery_idempotent_record SET version = version")
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(30)
        assert run.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=60_000)
        )
    (answer, took), patience = answers
    assert isinstance(answer, Held)
    assert took < 2
    assert patience == before
    assert before[0][0] > 2_000


def test_what_operators_did_ends_with_its_record_also_where_an_older_version_makes_the_next(
    open_store: Callable[..., DjangoStore],
) -> None:
    """Which knows nothing of the column, and leaves it as it is."""
    store = open_store("sqlite")
    done = Intervention(operation="complete", who="alice")
    record = claimed(store)
    assert store.amend(KEY, token=record.token, name="pay", value=VALUE, intervention=done)
    found = store.get(KEY)
    assert found is not None
    assert len(found.interventions) == 1
    execute(store.alias, "UPDATE celery_idempotent_record SET created_ms = created_ms + 1")
    found = store.get(KEY)
    assert found is not None
    assert found.interventions == ()
