"""Prune, retention and tokens by the database's clock: rows go when they are over, and tokens grow on."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Held, Identity, Record, Selection
from tests.sql import verbs
from tests.sql.databases import execute, rows, shift
from tests.sql.verbs import KEY
from tests.support.threads import all_at_once, in_background
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.db import connections

from celery_idempotent.django import store as django_store
from celery_idempotent.django.sql.rows import RowSnapshot, digest
from celery_idempotent.django.store import DjangoStore

HOUR = 3_600_000
MANY = [verbs.named(f"many-{n}") for n in range(50)]


def claimed(store: DjangoStore, identity: Identity = KEY, **changes: Any) -> Record:
    return verbs.claimed(store, identity, **{"keep_ms": 24 * HOUR, **changes})


def settle(store: DjangoStore, record: Record, keep_ms: int = 24 * HOUR) -> None:
    assert store.settle(verbs.end_of(record, keep_ms=keep_ms))


def count(store: DjangoStore) -> int:
    ((n,),) = rows(store.alias, "SELECT count(*) FROM celery_idempotent_record")
    connections[store.alias].close()
    return int(n)


def prune_ms(store: DjangoStore) -> int:
    ((at,),) = rows(store.alias, "SELECT prune_ms FROM celery_idempotent_record")
    connections[store.alias].close()
    return int(at)


def test_a_prune_works_in_batches_until_nothing_is_over(
    store: DjangoStore, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(django_store, "PRUNE_BATCH", 7)
    for identity in MANY[:30]:
        settle(store, claimed(store, identity))
    shift(store, HOUR)
    settle(store, claimed(store))
    shift(store, 23 * HOUR + 61_000)
    assert store.prune(limit=10) == 10
    assert store.prune(limit=1000) == 20
    assert store.prune(limit=1000) == 0
    assert store.get(KEY) is not None
    assert count(store) == 1


def test_what_lives_longer_than_expected_is_looked_at_again_then(store: DjangoStore):
    record = claimed(store)
    shift(store, HOUR)
    assert store.renew([verbs.renewal(record, keep_ms=48 * HOUR)]) == [True]
    shift(store, 23 * HOUR + 61_000)
    before = prune_ms(store)
    assert store.prune(limit=10) == 0
    assert prune_ms(store) > before + 24 * HOUR
    shift(store, 25 * HOUR)
    assert store.prune(limit=10) == 1


def test_a_write_that_prolongs_a_record_leaves_the_index_of_prunes_alone(store: DjangoStore):
    record = claimed(store)
    before = prune_ms(store)
    shift(store, HOUR)
    assert store.checkpoint(KEY, token=record.token, name="charge", value=verbs.VALUE)
    settle(store, record, keep_ms=48 * HOUR)
    assert prune_ms(store) == before


def test_a_row_that_is_over_before_it_was_expected_to_be_goes_an_hour_after_it(
    store: DjangoStore,
):
    settle(store, claimed(store), keep_ms=HOUR)
    settle(store, claimed(store, MANY[0]))
    assert store.release(MANY[1], token=claimed(store, MANY[1]).token)
    assert store.prune(limit=10) == 0
    for ms, left in ((HOUR + 1, 2), (HOUR, 1)):
        shift(store, ms)
        assert store.prune(limit=10) == 1
        assert count(store) == left
    assert store.get(MANY[0]) is not None


def test_tokens_grow_over_prunes_in_any_order_though_the_clock_steps_back(store: DjangoStore):
    older = claimed(store, MANY[0], keep_ms=48 * HOUR).token
    newer = claimed(store, MANY[1], keep_ms=HOUR).token
    assert newer > older
    for hours in (2, 50):
        shift(store, hours * HOUR)
        assert store.prune(limit=10) == 1
    shift(store, -60 * HOUR)
    assert claimed(store).token > newer


def test_prunes_at_once_delete_each_row_once(store: DjangoStore):
    for identity in MANY:
        settle(store, claimed(store, identity), keep_ms=1)
    shift(store, 2 * HOUR)
    assert sum(all_at_once(4, lambda _: store.prune(limit=1000))) == len(MANY)


def test_a_renewal_between_the_look_of_a_claim_and_its_write_keeps_the_key(
    store: DjangoStore, monkeypatch: pytest.MonkeyPatch
):
    record = claimed(store, lease_ms=1)
    wait_for(lambda: store.stats().stale, what="the end of its lease")
    write, renewed = RowSnapshot.write, []

    def overtaken(row: RowSnapshot, after: Any) -> None:
        monkeypatch.setattr(RowSnapshot, "write", write)
        lease = verbs.renewal(record, keep_ms=HOUR)
        renewed.extend(in_background(lambda: store.renew([lease])).result(30))
        write(row, after)

    monkeypatch.setattr(RowSnapshot, "write", overtaken)
    answer = verbs.claim(store, keep_ms=HOUR)
    assert (renewed, type(answer)) == ([True], Held)


def test_a_row_that_a_newer_version_wrote_is_not_guessed_at(
    store: DjangoStore, caplog: pytest.LogCaptureFixture
):
    record, stale = claimed(store, lease_ms=1), claimed(store, verbs.named("stale"), lease_ms=1)
    later, where = record.token + 1_000_000_000, f"WHERE token = {record.token}"
    wait_for(lambda: store.stats().stale == 2, what="the end of the leases")
    for changes in ("state = 'X'", f"state = 'P', data = '[', token = {later}"):
        execute(store.alias, f"UPDATE celery_idempotent_record SET {changes} {where}")
        connections[store.alias].close()
        with pytest.raises(StoreMisconfigured, match=f"{digest(KEY).hex()}.*newer version"):
            store.get(KEY)
    assert [each.identity for each in store.list(Selection()).records] == [stale.identity]
    assert digest(KEY).hex() in caplog.text
    # A sweep leaves it alone, and goes on.
    assert [each.identity for each in store.sweep(limit=10).interrupted] == [stale.identity]
    assert [store.discard(KEY) for _ in range(2)] == [True, False]
    assert claimed(store).token > later


def test_health_writes_and_remembers_the_first_use(store: DjangoStore):
    # Earlier tests of this process used the same tables, and lost their data.
    execute(store.alias, "DELETE FROM celery_idempotent_mark")
    store._mark = 0
    store.health()
    shift(store, 5)
    began = store.health().mark
    execute(store.alias, "DELETE FROM celery_idempotent_mark")
    shift(store, 5)
    assert (began < 0, store.health().mark > -began) == (True, True)
    if store.connections.own().vendor != "postgresql":
        return
    name = connections[store.alias].settings_dict["NAME"]
    execute(store.alias, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    try:
        store.close()
        found = store.health()
        assert (found.problem, found.stats is None) == ("refused", False)
    finally:
        execute(store.alias, f"ALTER DATABASE {name} RESET default_transaction_read_only")
        store.close()


def test_in_a_transaction_time_goes_on(store: DjangoStore) -> None:
    """PostgreSQL's own now() is when the transaction began: a task may take hours."""
    record = claimed(store)
    with store.transaction(record) as run:
        begun = store.now_ms()
        wait_for(lambda: store.now_ms() > begun + 5)
        assert run.settle(verbs.end_of(record))
    settled = store.get(KEY)
    assert settled is not None
    assert settled.updated_ms > begun + 5


def test_the_time_zone_of_a_session_changes_nothing(use_database: Callable[..., str]) -> None:
    zone = "SET time_zone = '+05:00'"
    store = DjangoStore(use_database("mariadb", options={"init_command": zone}))
    assert abs(store.now_ms() - time.time_ns() // 1_000_000) < 3_600_000
    store.close()
