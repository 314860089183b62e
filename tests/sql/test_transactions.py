"""A verb is a transaction of its own: whatever becomes of the caller's, and of its connection."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_idempotent.errors import StoreMisconfigured, StoreUnavailable
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Record,
    Renewal,
    SettleRequest,
    State,
    Stored,
)
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.db import DatabaseError, connections, transaction

from celery_idempotent.django.store import DjangoStore

KEY = Identity(namespace="charge", key="order-17")
SERVERS = ("postgresql", "mariadb")


def claim(store: DjangoStore, identity: Identity = KEY, **changes: Any) -> Any:
    asked = {"attempt": os.urandom(8), "lease_ms": 60_000, "keep_ms": 60_000, **changes}
    return store.claim(ClaimRequest(identity=identity, **asked))


def claimed(store: DjangoStore, identity: Identity = KEY, **changes: Any) -> Record:
    answer = claim(store, identity, **changes)
    assert isinstance(answer, Claimed)
    return answer.record


def settle(store: DjangoStore, record: Record) -> bool:
    return store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
    )


def in_thread(do: Callable[[], Any]) -> Any:
    """Do it in a thread of its own, which has no connection yet."""
    answers: list[Any] = []
    thread = threading.Thread(target=lambda: answers.append(do()))
    thread.start()
    thread.join(30)
    assert answers, "it waits for ever"
    return answers[0]


class Rollback(Exception):
    pass


@pytest.fixture(params=SERVERS)
def server_store(
    request: pytest.FixtureRequest, open_store: Callable[..., DjangoStore]
) -> Iterator[DjangoStore]:
    """A store in each database that is a server, whose threads' connections are left as they were."""
    store = open_store(request.param)
    yield store
    connections[store.alias].close()


def test_a_claim_outlives_the_callers_transaction(server_store: DjangoStore):
    store = server_store
    with pytest.raises(Rollback), transaction.atomic(using=store.alias):
        execute(store.alias, "SELECT 1")
        record = claimed(store)
        assert settle(store, record)
        raise Rollback
    found = store.get(KEY)
    assert found is not None
    assert found.state is State.COMPLETED


def test_others_see_a_claim_before_the_callers_transaction_ends(server_store: DjangoStore):
    with transaction.atomic(using=server_store.alias):
        claimed(server_store)
        assert isinstance(in_thread(lambda: claim(server_store)), Held)


def test_a_verb_works_after_the_callers_code_broke_its_transaction(server_store: DjangoStore):
    store = server_store
    record = claimed(store)
    with pytest.raises(Rollback), transaction.atomic(using=store.alias):
        with pytest.raises(DatabaseError):
            execute(store.alias, "SELECT * FROM no_such_table")
        assert store.renew([Renewal(identity=KEY, token=record.token, lease_ms=1, keep_ms=60_000)])
        assert store.release(KEY, token=record.token)
        raise Rollback
    assert store.get(KEY) is None


def test_a_verb_is_no_part_of_a_transaction_that_django_does_not_know_of(
    server_store: DjangoStore,
):
    alias = server_store.alias
    execute(alias, "BEGIN")
    claimed(server_store)
    execute(alias, "ROLLBACK")
    assert server_store.get(KEY) is not None


def test_on_sqlite_a_verb_is_part_of_the_callers_transaction(
    open_store: Callable[..., DjangoStore],
):
    store = open_store("sqlite")
    with pytest.raises(Rollback), transaction.atomic(using=store.alias):
        claimed(store)
        assert isinstance(claim(store), Held)
        raise Rollback
    assert store.get(KEY) is None
    with transaction.atomic(using=store.alias):
        record = claimed(store)
    assert settle(store, record)


def test_the_callers_open_connection_serves_where_it_is_idle(store: DjangoStore):
    execute(store.alias, "SELECT 1")
    own = connections[store.alias].connection
    store.close()
    record = claimed(store)
    assert settle(store, record)
    assert store.lines._spare._idle == []
    assert connections[store.alias].connection is own


def test_a_thread_that_ends_leaves_no_connection_behind(store: DjangoStore):
    connections[store.alias].close()
    store.close()
    for _ in range(3):
        in_thread(lambda: claim(store))
    # A connection that nobody closed would be a warning, and warnings are errors.
    assert len(store.lines._spare._idle) == 1


@pytest.mark.parametrize("loop", [False, True])
def test_a_store_that_was_not_closed_closes_its_connections_when_it_goes(
    store: DjangoStore, loop: bool
):
    """The heartbeat's thread writes what was counted, perhaps after the store was closed; in ASGI under a loop."""
    stores = [DjangoStore(store.alias)]
    with transaction.atomic(using=store.alias):
        stores[0].stats()
    idle = [connection for _, connection in stores[0].lines._spare._idle]

    async def go() -> None:
        stores.clear()
        gc.collect()

    if loop:
        asyncio.run(go())
    else:
        stores.clear()
        gc.collect()
    assert [connection.connection for connection in idle] == [None] * len(idle)
    assert idle or store.lines.own().vendor == "sqlite"


def sessions(store: DjangoStore) -> int:
    ((number,),) = rows(
        store.alias, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    )
    return int(number)


def test_many_threads_share_few_connections(open_store: Callable[..., DjangoStore]):
    store = open_store("postgresql")
    names = [Identity(namespace="charge", key=f"{n}") for n in range(40)]
    before = sessions(store)  # with those of other tests' stores
    threads = [threading.Thread(target=claim, args=(store, name)) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(store.get(name) is not None for name in names)
    assert sessions(store) - before <= 8


@pytest.mark.parametrize("own", [True, False], ids=["of the thread", "of the store"])
def test_a_connection_that_the_server_closed_is_replaced(server_store: DjangoStore, own: bool):
    store = server_store
    store.close()
    connections[store.alias].close()
    if own:
        execute(store.alias, "SELECT 1")
    record = claimed(store)
    _end_all_sessions(store.alias)
    assert settle(store, record)
    _end_all_sessions(store.alias)
    assert claim(store).record.state is State.COMPLETED
    if own:
        assert rows(store.alias, "SELECT 1") == [(1,)]


def test_a_dead_connection_in_a_transaction_does_not_stop_a_release(server_store: DjangoStore):
    store = server_store
    record = claimed(store)
    with pytest.raises(DatabaseError), transaction.atomic(using=store.alias):
        execute(store.alias, "SELECT 1")
        _end_all_sessions(store.alias)
        assert store.release(KEY, token=record.token)
        execute(store.alias, "SELECT 1")
    assert store.get(KEY) is None


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_uses_connections_of_its_own(server_store: DjangoStore):
    store = server_store
    execute(store.alias, "SELECT 1")
    record = claimed(store)
    with transaction.atomic(using=store.alias):
        claim(store, Identity(namespace="charge", key="fills the pool"))
    pid = os.fork()
    if not pid:
        try:
            ok = isinstance(claim(store), Held) and settle(store, record)
            ok = ok and settle(store, claimed(store, Identity(namespace="charge", key="other")))
        finally:
            os._exit(0 if ok else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    # Neither was closed by the child's end, nor are two in the middle of one conversation.
    assert rows(store.alias, "SELECT 17") == [(17,)]
    with transaction.atomic(using=store.alias):
        assert claim(store).record.state is State.COMPLETED


def make_impatient(store: DjangoStore, patch: pytest.MonkeyPatch) -> None:
    """Let statements wait for a row no longer than a test would."""
    from celery_idempotent.django.sql import atomic, shortcuts

    words = store.lines._words
    assert words is not None
    words.lock_wait = words.lock_wait.replace("5", "1")
    words.begin = words.begin.replace("5000", "100")
    words.alone = (words.alone[0].replace("5000", "100"), words.alone[1])
    patch.setattr(shortcuts, "LOCK_TIMEOUT_MS", 100)
    for name in ("_LOCK_TIMEOUT_SET", "_SETTLE_WITH_LEASE"):
        patch.setattr(atomic, name, getattr(atomic, name).replace("5000", "100"))


def test_no_verb_waits_for_ever_for_a_row(
    server_store: DjangoStore, monkeypatch: pytest.MonkeyPatch
):
    """A process froze between the settle in its transaction and the COMMIT."""
    store = server_store
    record = claimed(store)
    make_impatient(store, monkeypatch)
    verbs: list[Callable[[], Any]] = [
        lambda: settle(store, record),
        lambda: store.release(KEY, token=record.token),
        lambda: store.interrupt(KEY, token=record.token),
        lambda: store.forget(KEY),
        lambda: settle_atomically(store, record),
    ]
    with transaction.atomic(using=store.alias):
        execute(store.alias, "UPDATE celery_idempotent_record SET version = version + 1")
        for verb in verbs:
            with pytest.raises(StoreUnavailable):
                in_thread_raising(verb)
    assert settle(store, record)
    with transaction.atomic(using=store.alias):
        execute(store.alias, "UPDATE celery_idempotent_record SET version = version + 1")
        with pytest.raises(StoreUnavailable):
            in_thread_raising(lambda: store.mark_delivered(KEY, token=record.token))
    assert store.mark_delivered(KEY, token=record.token)


def test_no_verb_waits_for_ever_for_a_lease_or_a_counter(
    server_store: DjangoStore, monkeypatch: pytest.MonkeyPatch
):
    """A process froze while it wrote one, between BEGIN and COMMIT."""
    store = server_store
    record = claimed(store)
    lease = Renewal(identity=KEY, token=record.token, lease_ms=60_000, keep_ms=1)
    value = Stored(content_type="a", content_encoding="b", body=b"c")

    def step() -> bool:
        return store.checkpoint(KEY, token=record.token, name="one", value=value)

    store.count({("charge", "claimed"): 1})
    make_impatient(store, monkeypatch)
    with transaction.atomic(using=store.alias):
        execute(store.alias, "UPDATE celery_idempotent_lease SET version = version + 1")
        execute(store.alias, "UPDATE celery_idempotent_counter SET count = count + 1")
        for verb in (
            lambda: store.renew([lease]),
            step,
            lambda: store.count({("charge", "claimed"): 1}),
        ):
            with pytest.raises(StoreUnavailable):
                in_thread_raising(verb)
    assert store.renew([lease]) == [True]
    assert step()
    with transaction.atomic(using=store.alias):
        execute(store.alias, "UPDATE celery_idempotent_lease SET version = version + 1")
        # What is left of the lease is left to the sweep.
        assert in_thread(lambda: settle_atomically(store, record))
    assert rows(store.alias, "SELECT 1 FROM celery_idempotent_lease")


def settle_atomically(store: DjangoStore, record: Record) -> bool:
    try:
        with store.transaction(record) as run:
            return run.settle(
                SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
            )
    finally:
        connections[store.alias].close()


def test_the_settle_of_a_transaction_leaves_its_patience_as_the_task_set_it(
    open_store: Callable[..., DjangoStore],
):
    store = open_store("postgresql")
    record = claimed(store)
    with store.transaction(record) as run:
        execute(store.alias, "SET LOCAL lock_timeout = 1234")
        assert run.settle(
            SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=60_000)
        )
        assert rows(store.alias, "SHOW lock_timeout") == [("1234ms",)]
    assert rows(store.alias, "SHOW lock_timeout") == [("0",)]
    connections[store.alias].close()


def test_a_lease_whose_row_is_held_costs_the_others_no_renewal(
    server_store: DjangoStore, monkeypatch: pytest.MonkeyPatch
):
    """A session froze while it wrote one of them: all other claims of the process live on."""
    store = server_store
    keys = [Identity(namespace="charge", key=f"order-{n}") for n in range(5)]
    records = [claimed(store, key) for key in keys]
    leases = [
        Renewal(identity=key, token=record.token + (n == 4), lease_ms=600_000, keep_ms=1)
        for n, (key, record) in enumerate(zip(keys, records, strict=True))
    ]
    make_impatient(store, monkeypatch)

    def longer() -> list[bool]:
        found = [store.get(key) for key in keys]
        return [
            new is not None and (new.deadline_ms or 0) > (old.deadline_ms or 0) + 100_000
            for new, old in zip(found, records, strict=True)
        ]

    with transaction.atomic(using=store.alias):
        execute(
            store.alias,
            "UPDATE celery_idempotent_lease SET version = version + 1 WHERE token = %s",
            (records[2].token,),
        )
        with pytest.raises(StoreUnavailable):
            in_thread_raising(lambda: store.renew(leases))
        assert in_thread(longer) == [True, True, False, True, False]
    assert store.renew(leases) == [True, True, True, True, False]
    assert longer() == [True, True, True, True, False]


def in_thread_raising(do: Callable[[], Any]) -> None:
    def caught() -> Exception | None:
        try:
            do()
        except Exception as error:  # noqa: BLE001 - handed on
            return error
        return None

    error = in_thread(caught)
    if error is not None:
        raise error


def test_a_server_that_does_not_answer_is_unavailable(use_database: Callable[..., str]):
    for vendor in SERVERS:
        settings = connections[use_database(vendor)].settings_dict
        alias = databases.add_alias(
            f"nobody_{vendor}", {**settings, "PORT": "1", "PASSWORD": "geheim"}
        )
        store = DjangoStore(alias)
        with pytest.raises(StoreUnavailable, match=alias) as caught:
            claim(store)
        assert "geheim" not in str(caught.value)
        databases.drop_alias(alias)


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


def test_a_router_cannot_send_the_records_elsewhere(
    use_database: Callable[..., str], settings_routers: Callable[[list[object]], None]
):
    class Elsewhere:
        def db_for_read(self, *_: object, **__: object) -> str:
            return "nowhere"

        db_for_write = db_for_read

    here, there = use_database("sqlite", "here"), use_database("postgresql", "there")
    settings_routers([Elsewhere()])
    store, other = DjangoStore(here), DjangoStore(there)
    record = claimed(store)
    assert other.get(KEY) is None
    assert claimed(other).token != record.token
    assert settle(store, record)
    other.close()


@pytest.fixture
def settings_routers() -> Iterator[Callable[[list[object]], None]]:
    from django.test import override_settings

    changed: list[Any] = []

    def use(routers: list[object]) -> None:
        override = override_settings(DATABASE_ROUTERS=routers)
        override.enable()
        changed.append(override)

    yield use
    for override in changed:
        override.disable()


def _end_all_sessions(alias: str) -> None:
    """End every session in this database but one of our own that does it."""
    settings = connections[alias].settings_dict
    other = databases.add_alias("executioner", {**settings})
    if connections[other].vendor == "postgresql":
        rows(
            other,
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()",
        )
        count = (
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
    else:
        count = (
            "SELECT count(*) FROM information_schema.processlist"
            " WHERE db = database() AND id <> connection_id()"
        )
        for (session,) in rows(other, count.replace("count(*)", "id")):
            execute(other, f"KILL {session}")
    wait_for(lambda: rows(other, count) == [(0,)], timeout=20)
    databases.drop_alias(other)
