"""The tables: made, unmade, and updated in place."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.records import (
    Selection,
    State,
)
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.sql.verbs import claimed, end_of, named, renewal
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.apps import apps
from django.db import connections
from django.db.transaction import atomic, set_rollback

from celery_idempotent.django.fields import NowMs
from celery_idempotent.django.sql.connections import Session
from celery_idempotent.django.store import DjangoStore


def pair(store: DjangoStore, key: str) -> None:
    """Claim and settle."""
    record = claimed(store, named(key), keep_ms=86_400_000)
    assert store.settle(end_of(record, value=None, keep_ms=86_400_000))


@pytest.mark.parametrize("vendor", databases.VENDORS)
def test_the_migrations_go_forward_and_back(
    sql_databases: Callable[[str], Any], tmp_path: Path, vendor: str
):
    sql_databases(vendor)
    with databases.database(vendor, tmp_path) as settings:
        alias = databases.add_alias(f"migrated_{vendor}", settings)
        try:
            for _ in range(2):
                databases.migrate(alias)
                assert _tables(alias) == {
                    model._meta.db_table
                    for model in apps.get_app_config("celery_idempotent").get_models()
                    if model._meta.managed and not model._meta.proxy
                }
                store = DjangoStore(alias)
                pair(store, "order-17")
                store.close()
                databases.migrate(alias, ("celery_idempotent", "zero"))
                assert _tables(alias) == set()
        finally:
            databases.drop_alias(alias)


def test_djangos_checks_find_nothing(open_store: Callable[..., DjangoStore]):
    from django.core.checks import run_checks

    aliases = [open_store(vendor).alias for vendor in databases.VENDORS]
    found = run_checks(databases=aliases)
    assert [each for each in found if "celery_idempotent" in str(each.obj)] == []


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DjangoStore]:
    """A store in a PostgreSQL database of its own, in which some thousand keys were settled, half of them FAILED."""
    with databases.fresh("postgresql", tmp_path_factory.mktemp("filled"), "filled"):
        store = DjangoStore("filled")
        connections[store.alias].close()
        for n in range(400):
            pair(store, f"order-{n}")
        store.close()
        execute(
            store.alias,
            "INSERT INTO celery_idempotent_record (digest, namespace, scope, key, prune_ms, version, state, token,"
            " created_ms, updated_ms, expires_ms, crashes, task_id, data)"
            " SELECT substring(sha256(digest || n::text::bytea) for 16), namespace, scope, key || '-' || n,"
            " prune_ms + n, version, CASE WHEN n > 5 THEN 'F' ELSE state END,"
            " token, created_ms, updated_ms, expires_ms, crashes, task_id, data"
            " FROM celery_idempotent_record, generate_series(1, 10) AS n ORDER BY token, n",
        )
        execute(store.alias, "VACUUM ANALYZE")
        yield store
        store.close()


def test_renewals_stay_in_their_page(filled: DjangoStore):
    """No index is touched by them: PostgreSQL's word is HOT."""
    lease = renewal(claimed(filled, named("renewed"), keep_ms=86_400_000), keep_ms=1)

    def updates() -> Any:
        # A session tells its figures when it ends.
        connections[filled.alias].close()
        filled.close()
        return rows(
            filled.alias,
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
            " WHERE relname = 'celery_idempotent_record'",
        )[0]

    before = wait_for(lambda: (found := updates())[0] >= 400 and found, timeout=30, interval=0.2)
    for _ in range(100):
        assert filled.renew([lease]) == [True]
    after = wait_for(
        lambda: (found := updates())[0] >= before[0] + 100 and found, timeout=30, interval=0.2
    )
    assert (after[1] - before[1]) / (after[0] - before[0]) > 0.9


Statements = list[tuple[str, Any]]


@pytest.fixture
def statements(monkeypatch: pytest.MonkeyPatch) -> Statements:
    """The statements of all verbs, with their parameters."""
    seen: Statements = []
    for name in ("rows", "execute"):
        run = getattr(Session, name)

        def note(session: Session, sql: str, params: Any = (), run: Any = run, **first: str) -> Any:
            seen.append((sql, params))
            return run(session, sql, params, **first)

        monkeypatch.setattr(Session, name, note)
    return seen


def test_every_statement_finds_its_rows_by_an_index(filled: DjangoStore, statements: Statements):
    """It reads a few pages, and not all keys or all failures: more than a hundred pages."""
    pair(filled, "explained")
    pair(filled, "explained too")
    filled.forget(named("explained too"))
    filled.sweep(limit=10)
    filled.prune(limit=10)
    for state in (State.INTERRUPTED, State.FAILED, State.COMPLETED):
        filled.list(Selection(states=frozenset({state})), limit=10)
    explained = 0
    for sql, params in statements:
        with atomic(using=filled.alias):
            explain = f"EXPLAIN (ANALYZE, BUFFERS) {sql}"
            plan = "\n".join(line for (line,) in rows(filled.alias, explain, params or ()))
            set_rollback(True, using=filled.alias)
        # The first line is of the whole plan, with the read ones last.
        read = re.search(r"Buffers: shared( hit=\d+)?( read=\d+)?", plan)
        pages = sum(map(int, re.findall(r"\d+", read[0]))) if read else 0
        assert pages < 40, (sql, plan)
        assert "Seq Scan on celery_idempotent_record" not in plan, (sql, plan)
        explained += "celery_idempotent_record" in sql
    assert explained >= 11


def test_the_messages_that_are_due_are_found_by_their_index(filled: DjangoStore):
    from celery_idempotent.django.models import OutboxMessage

    with atomic(using=filled.alias):
        execute(filled.alias, "SET LOCAL enable_seqscan = off")
        due = OutboxMessage.objects.using(filled.alias).filter(due_ms__lte=NowMs())
        assert "Index Cond: (due_ms <=" in due.explain()


def test_on_sqlite_what_is_unfinished_is_found_by_its_state(
    open_store: Callable[..., DjangoStore], statements: Statements
):
    store = open_store("sqlite")
    store.stats()
    store.sweep(limit=10)
    for state in (State.INTERRUPTED, State.FAILED):
        store.list(Selection(states=frozenset({state})))
        store.list(Selection(states=frozenset({state})), cursor="n:1:0")
    store.prune(limit=10)
    seen = [each for each in statements if "FROM celery_idempotent_record" in each[0]]
    assert len(seen) == 7
    for sql, params in seen:
        plan = str(rows(store.alias, f"EXPLAIN QUERY PLAN {sql}", params))
        assert "unfinished (state=?" in plan or "(prune_ms<?)" in plan, (sql, plan)


def test_on_mariadb_no_failure_is_read_that_is_not_asked_for(
    open_store: Callable[..., DjangoStore], statements: Statements
):
    store = open_store("mariadb")
    for n in range(60):
        record = claimed(store, named(f"order-{n}"), keep_ms=86_400_000)
        assert store.settle(end_of(record, state=State.FAILED, keep_ms=86_400_000))
    statements.clear()
    store.sweep(limit=10)
    store.prune(limit=10)
    assert store.list(Selection(states=frozenset({State.INTERRUPTED}))).looked_at == 0
    execute(store.alias, "FLUSH STATUS")
    for sql, params in statements:
        rows(store.alias, sql, params)
    status = rows(store.alias, "SHOW SESSION STATUS LIKE 'Handler_read%'")
    assert sum(int(number) for _, number in status) < 30


def _tables(alias: str) -> set[str]:
    return {
        table
        for table in connections[alias].introspection.table_names()
        if table.startswith("celery_idempotent")
    }
