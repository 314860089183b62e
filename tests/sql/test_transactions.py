"""A verb is a transaction of its own: whatever becomes of the caller's, and of its connection."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Held, Record, State
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.sql.verbs import KEY, claim, claimed, end_of, found, named, renewal
from tests.support.threads import all_at_once, in_background

pytest.importorskip("django")

from django.db import DatabaseError, connections, transaction
from django.test import override_settings

from celery_idempotent.django.store import DjangoStore

SERVERS = ("postgresql", "mariadb")


def settle(store: DjangoStore, record: Record) -> bool:
    return store.settle(end_of(record))


class Rollback(Exception):
    pass


def on(*vendors: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("store", vendors, indirect=True)


@pytest.fixture(params=databases.VENDORS)
def store(
    request: pytest.FixtureRequest, open_store: Callable[..., DjangoStore]
) -> Iterator[DjangoStore]:
    """A store in each database, whose threads' connections are left as they were."""
    store = open_store(request.param)
    yield store
    connections[store.alias].close()


@on(*SERVERS)
def test_a_claim_is_seen_before_the_callers_transaction_ends_and_outlives_it(store: DjangoStore):
    with pytest.raises(Rollback), transaction.atomic(using=store.alias):
        execute(store.alias, "SELECT 1")
        record = claimed(store)
        assert isinstance(in_background(lambda: claim(store)).result(30), Held)
        assert settle(store, record)
        raise Rollback
    assert found(store).state is State.COMPLETED


@on(*SERVERS)
def test_a_verb_works_after_the_callers_code_broke_its_transaction(store: DjangoStore):
    record = claimed(store)
    with pytest.raises(Rollback), transaction.atomic(using=store.alias):
        with pytest.raises(DatabaseError):
            execute(store.alias, "SELECT * FROM no_such_table")
        assert store.renew([renewal(record, lease_ms=1)])
        assert store.release(KEY, token=record.token)
        raise Rollback
    assert store.get(KEY) is None


@on(*SERVERS)
def test_a_verb_is_no_part_of_a_transaction_that_django_does_not_know_of(store: DjangoStore):
    execute(store.alias, "BEGIN")
    claimed(store)
    execute(store.alias, "ROLLBACK")
    assert store.get(KEY) is not None


@on("sqlite")
def test_on_sqlite_a_verb_is_part_of_the_callers_transaction(store: DjangoStore):
    with pytest.raises(Rollback), transaction.atomic(using=store.alias):
        claimed(store)
        assert isinstance(claim(store), Held)
        raise Rollback
    assert store.get(KEY) is None
    with transaction.atomic(using=store.alias):
        record = claimed(store)
    assert settle(store, record)


def test_a_thread_that_ends_leaves_no_connection_behind(store: DjangoStore):
    connections[store.alias].close()
    store.close()
    for _ in range(3):
        in_background(lambda: claim(store)).result(30)
    # A connection that nobody closed would be a warning, and warnings are errors.
    assert len(store.connections._idle) == (store.connections.own().vendor != "sqlite")


@pytest.mark.parametrize("loop", [False, True])
def test_a_store_that_was_not_closed_closes_its_connections_when_it_goes(
    store: DjangoStore, loop: bool
):
    """The heartbeat's thread writes what was counted, perhaps after the store was closed; in ASGI under a loop."""
    stores = [DjangoStore(store.alias)]
    with transaction.atomic(using=store.alias):
        stores[0].stats()
    idle = list(stores[0].connections._idle)

    async def go() -> None:
        stores.clear()
        gc.collect()

    if loop:
        asyncio.run(go())
    else:
        stores.clear()
        gc.collect()
    assert [session.connection.connection for session in idle] == [None] * len(idle)
    assert idle or store.connections.own().vendor == "sqlite"


def sessions(store: DjangoStore) -> int:
    ((number,),) = rows(
        store.alias, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    )
    return int(number)


@on("postgresql")
def test_many_threads_share_few_connections(store: DjangoStore):
    names = [named(f"{n}") for n in range(40)]
    before = sessions(store)  # with those of other tests' stores
    all_at_once(len(names), lambda n: claim(store, names[n]))
    assert all(store.get(name) is not None for name in names)
    assert sessions(store) - before <= 8


@on(*SERVERS)
def test_a_connection_that_the_server_closed_is_replaced(store: DjangoStore):
    record = claimed(store)
    databases.end_sessions(store.alias)
    assert settle(store, record)
    databases.end_sessions(store.alias)
    assert claim(store).record.state is State.COMPLETED


@on(*SERVERS)
def test_an_atomic_run_begins_on_a_connection_that_the_server_closed(store: DjangoStore):
    """Django checks one of its own at most once a request: nothing has run, so it begins again."""
    record = claimed(store)
    execute(store.alias, "SELECT 1")
    databases.end_sessions(store.alias)
    with store.transaction(record) as run:
        assert run.settle(end_of(record))


@on(*SERVERS)
def test_a_dead_connection_in_a_transaction_does_not_stop_a_release(store: DjangoStore):
    record = claimed(store)
    with pytest.raises(DatabaseError), transaction.atomic(using=store.alias):
        execute(store.alias, "SELECT 1")
        databases.end_sessions(store.alias)
        assert store.release(KEY, token=record.token)
        execute(store.alias, "SELECT 1")
    assert store.get(KEY) is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
@on(*SERVERS)
def test_a_forked_child_uses_connections_of_its_own(store: DjangoStore):
    execute(store.alias, "SELECT 1")
    record = claimed(store)
    with transaction.atomic(using=store.alias):
        claim(store, named("fills the pool"))
    pid = os.fork()
    if not pid:
        try:
            ok = isinstance(claim(store), Held) and settle(store, record)
            ok = ok and settle(store, claimed(store, named("other")))
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # Neither was closed by the child's end, nor are two in the middle of one conversation.
    assert rows(store.alias, "SELECT 17") == [(17,)]
    with transaction.atomic(using=store.alias):
        assert claim(store).record.state is State.COMPLETED


@on("postgresql")
def test_a_transaction_that_has_the_row_keeps_no_look_waiting(store: DjangoStore):
    """A process froze between the settle in its transaction and the COMMIT."""
    record = claimed(store)
    with transaction.atomic(using=store.alias):
        execute(store.alias, "UPDATE celery_idempotent_record SET state = 'C'")
        assert isinstance(in_background(lambda: claim(store)).result(30), Held)
        assert in_background(lambda: store.get(KEY)).result(30) == record
        assert in_background(lambda: store.sweep(limit=10)).result(30).interrupted == ()


def test_a_database_without_the_tables_says_what_to_do(sql_databases: Any, tmp_path: Any):
    for vendor in databases.VENDORS:
        sql_databases(vendor)
        with databases.database(vendor, tmp_path) as settings:
            alias = databases.add_alias(f"empty_{vendor}", settings)
            store = DjangoStore(alias)
            with pytest.raises(StoreMisconfigured, match=r"INSTALLED_APPS.*migrate"):
                claim(store)
            store.close()
            databases.drop_alias(alias)


def test_a_task_id_that_no_database_takes_is_no_trouble(store: DjangoStore):
    record = claimed(store, task_id="a\0b", worker="\0")
    assert record.task_id == "a\ufffdb"
    assert store.get(KEY) == record


def test_a_refused_statement_says_no_value(store: DjangoStore, monkeypatch: pytest.MonkeyPatch):
    from django.db import DataError

    from celery_idempotent.django.sql.connections import Session

    def refuse(*_: object) -> None:
        raise DataError("value too long: 'geheim'")

    monkeypatch.setattr(Session, "rows", refuse)
    with pytest.raises(StoreMisconfigured, match="refused a statement") as caught:
        claim(store)
    assert "geheim" not in str(caught.value)


def test_an_alias_that_is_not_there_says_what_to_do(sql_databases: Any):
    sql_databases("sqlite")
    with pytest.raises(StoreMisconfigured, match="no database 'elsewhere'"):
        claim(DjangoStore("elsewhere"))


def test_a_router_cannot_send_the_records_elsewhere(use_database: Callable[..., str]):
    class Elsewhere:
        def db_for_read(self, *_: object, **__: object) -> str:
            return "nowhere"

        db_for_write = db_for_read

    here, there = use_database("sqlite", "here"), use_database("postgresql", "there")
    store, other = DjangoStore(here), DjangoStore(there)
    with override_settings(DATABASE_ROUTERS=[Elsewhere()]):
        record = claimed(store)
        assert other.get(KEY) is None
        assert claimed(other).token != record.token
        assert settle(store, record)
    other.close()
