"""Two versions of an app with a database for their records: what a run writes, and both of its ends, are one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django import IdempotentTask
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.records import Claimed, ClaimRequest, Identity, State
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.support.versions import Version

OLD = Identity(namespace="charge", key="o-1")
NEW = Identity(namespace="charge", key='["o-1","sale"]')


@pytest.fixture(params=databases.KINDS)
def store(
    request: pytest.FixtureRequest, open_store: Callable[..., DjangoStore]
) -> Iterator[DjangoStore]:
    """A store, with a table ``effects`` of one row, ``n`` = 0."""
    store = open_store(request.param)
    execute(store.alias, "DROP TABLE IF EXISTS effects")
    execute(store.alias, "CREATE TABLE effects (n integer)")
    execute(store.alias, "INSERT INTO effects VALUES (0)")
    yield store
    connections[store.alias].close()
    execute(store.alias, "DROP TABLE effects")
    connections[store.alias].close()


@pytest.fixture(params=[True, False], ids=["atomic", "lease"])
def two(request: pytest.FixtureRequest, store: DjangoStore) -> Iterator[tuple[Version, Version]]:
    """The versions before and after the deploy."""
    common: dict[str, Any] = {"base": IdempotentTask, "idempotency_atomic": request.param}
    before = Version(store, idempotency_key="order", **common)
    finer: dict[str, Any] = {"idempotency_key": ("order", "kind")}
    after = Version(store, **finer, idempotency_key_before="order", **common)
    yield before, after
    before.close()
    after.close()


def acting(store: DjangoStore) -> Callable[[Any], str]:
    def act(_: Any) -> str:
        execute(store.alias, "UPDATE effects SET n = n + 1")
        return "receipt"

    return act


def effects(store: DjangoStore) -> int:
    ((n,),) = rows(store.alias, "SELECT n FROM effects")
    return int(n)


def states(store: DjangoStore) -> list[State | None]:
    found = [store.get(each) for each in (OLD, NEW)]
    return [None if each is None else each.state for each in found]


@pytest.mark.parametrize("first", [0, 1])
def test_every_operation_runs_once(two, store, first):
    one, other = two[first], two[1 - first]
    one.does = other.does = acting(store)
    sent, again = one.publish("o-1"), other.publish("o-1")
    assert one.run(sent) == ("SUCCESS", "receipt")
    for message in (again, sent):
        assert other.run(message) == ("SUCCESS", "receipt")
    assert effects(store) == 1
    assert states(store) == [State.COMPLETED, State.COMPLETED if first else None]


def test_what_failed_is_free_under_both(two, store):
    before, after = two

    def fails(_: Any) -> None:
        acting(store)(None)
        raise ValueError

    after.does, before.does = fails, acting(store)
    sent = after.publish("o-1")
    assert after.run(sent)[0] == "FAILURE"
    assert states(store) == [None, None]
    assert before.run(sent) == ("SUCCESS", "receipt")


def test_a_run_whose_old_key_was_taken_leaves_nothing(two, store):
    """In a transaction not even its writes; and it goes on as a duplicate of who has the key now."""
    _, after = two

    def is_late(task: Any) -> None:
        acting(store)(task)
        # As by a worker of the old version, which found the lease run out.
        record = store.get(OLD)
        assert record is not None
        assert store.forget(OLD, token=record.token)
        theirs = store.claim(
            ClaimRequest(identity=OLD, attempt=os.urandom(8), lease_ms=60_000, keep_ms=60_000)
        )
        assert isinstance(theirs, Claimed)

    if store.alias.startswith("sqlite") and after.task.idempotency_policy.atomic:
        pytest.skip("one writer at a time: nobody takes a key while the run's transaction is open")
    after.does = is_late
    word, _again = after.run(after.publish("o-1"))
    assert word == "again"
    assert effects(store) == (0 if after.task.idempotency_policy.atomic else 1)
    assert states(store) == [State.PROCESSING, None]
