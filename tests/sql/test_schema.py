"""The tables: made, unmade, and updated in place."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Selection,
    SettleRequest,
    State,
)
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.support.waiting import wait_for

pytest.importorskip("django")

from django.apps import apps
from django.core.management import call_command
from django.db import connections

from celery_idempotent.django.store import DjangoStore


def pair(store: DjangoStore, key: str) -> None:
    """Claim and settle."""
    answer = store.claim(
        ClaimRequest(
            identity=Identity(namespace="charge", key=key),
            attempt=os.urandom(8),
            lease_ms=60_000,
            keep_ms=86_400_000,
        )
    )
    assert isinstance(answer, Claimed)
    assert store.settle(
        SettleRequest(record=answer.record, state=State.COMPLETED, value=None, keep_ms=86_400_000)
    )


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
                    if model._meta.managed
                }
                store = DjangoStore(alias)
                pair(store, "order-17")
                store.close()
                databases.migrate(alias, ("celery_idempotent", "zero"))
                assert _tables(alias) == set()
        finally:
            databases.drop_alias(alias)


def test_no_migration_is_missing(sql_databases: Callable[[str], Any]):
    sql_databases("sqlite")
    call_command("makemigrations", "celery_idempotent", check=True, dry_run=True, verbosity=0)


def test_djangos_checks_find_nothing(open_store: Callable[..., DjangoStore]):
    from django.core.checks import run_checks

    aliases = [open_store(vendor).alias for vendor in databases.VENDORS]
    found = run_checks(databases=aliases)
    assert [each for each in found if "celery_idempotent" in str(each.obj)] == []


@pytest.fixture(scope="module")
def filled(sql_databases: Callable[[str], Any], tmp_path_factory: Any) -> Iterator[DjangoStore]:
    """A store in a PostgreSQL database of its own, in which some thousand keys were settled."""
    sql_databases("postgresql")
    with databases.database("postgresql", tmp_path_factory.mktemp("filled")) as settings:
        store = DjangoStore(databases.add_alias("filled", settings))
        databases.migrate(store.alias)
        connections[store.alias].close()
        for n in range(400):
            pair(store, f"order-{n}")
        store.close()
        execute(
            store.alias,
            "INSERT INTO celery_idempotent_record SELECT id + 100000, token, created_ms, updated_ms,"
            " expires_ms, prune_ms + id, version, crashes, attempts, state, reserved, replaced,"
            " delivered, swept, substring(sha256(digest || n::text::bytea) for 16), fingerprint, namespace,"
            " scope, key || '-' || n, task_id, value, note"
            " FROM (SELECT 10000 * n + id AS id, n, token, created_ms, updated_ms, expires_ms,"
            " prune_ms, version, crashes, attempts, state, reserved, replaced, delivered, swept, digest,"
            " fingerprint, namespace, scope, key, task_id, value, note"
            " FROM celery_idempotent_record, generate_series(1, 10) AS n) x",
        )
        execute(store.alias, "ANALYZE")
        yield store
        store.close()
        databases.drop_alias(store.alias)


def test_nine_settles_in_ten_stay_in_their_page(filled: DjangoStore):
    """No index is touched by them: PostgreSQL's word is HOT."""

    def updates() -> Any:
        # A session tells its figures when it ends.
        connections[filled.alias].close()
        ((total, hot),) = rows(
            filled.alias,
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
            " WHERE relname = 'celery_idempotent_record'",
        )
        return (total, hot) if total >= 400 else None

    total, hot = wait_for(updates, timeout=30, interval=0.2)
    assert hot / total > 0.9


def test_every_statement_finds_its_rows_by_an_index(filled: DjangoStore):
    seen: list[tuple[str, Any]] = []

    def note(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        seen.append((sql, params))
        return run(sql, params, many, context)

    execute(filled.alias, "SELECT 1")
    with connections[filled.alias].execute_wrapper(note):
        pair(filled, "explained")
        pair(filled, "explained too")
        filled.forget(Identity(namespace="charge", key="explained too"))
        filled.sweep(limit=10)
        filled.prune(limit=10)
    explained = 0
    prepared: dict[str, str] = {}
    for sql, params in seen:
        if sql.startswith("PREPARE"):
            prepared[sql.split()[1]] = sql
        if sql.startswith(("BEGIN", "COMMIT", "ROLLBACK", "PREPARE")):
            continue
        plan = "\n".join(line for (line,) in rows(filled.alias, f"EXPLAIN {sql}", params or ()))
        assert "Seq Scan on celery_idempotent_record" not in plan, (sql, plan)
        name = sql.removeprefix("EXECUTE ").partition("(")[0].strip()
        explained += "celery_idempotent_record" in prepared.get(name, sql)
    assert explained >= 6


def test_what_ended_badly_is_found_by_an_index_of_nothing_else(filled: DjangoStore):
    ((definition,),) = rows(
        filled.alias,
        "SELECT indexdef FROM pg_indexes WHERE indexname = 'celery_idempotent_ended'",
    )
    assert "(state, token, digest) WHERE" in definition
    seen: list[str] = []

    def note(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if sql.startswith("SELECT"):
            told = run(f"EXPLAIN {sql}", params, many, context)
            seen.append("\n".join(line for (line,) in context["cursor"].fetchall()))
            del told
        return run(sql, params, many, context)

    execute(filled.alias, "SET enable_seqscan = off")
    with connections[filled.alias].execute_wrapper(note):
        for state in (State.INTERRUPTED, State.FAILED):
            filled.list(Selection(states=frozenset({state})))
            filled.list(Selection(states=frozenset({state})), cursor="n:1:00")
    plans = [plan for plan in seen if "celery_idempotent_lease" in plan]
    assert len(plans) == 8
    assert all("Scan Backward using celery_idempotent_ended" in plan for plan in plans), plans


def test_on_sqlite_what_ended_badly_is_found_by_that_index(open_store: Callable[..., DjangoStore]):
    store = open_store("sqlite")
    plans: list[str] = []

    def note(run: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
        if "celery_idempotent_lease WHERE" in sql and "state = '" in sql:
            run(f"EXPLAIN QUERY PLAN {sql}", params, many, context)
            plans.append(" ".join(str(row[-1]) for row in context["cursor"].fetchall()))
        return run(sql, params, many, context)

    execute(store.alias, "SELECT 1")
    with connections[store.alias].execute_wrapper(note):
        store.stats()
        for state in (State.INTERRUPTED, State.FAILED):
            store.list(Selection(states=frozenset({state})))
            store.list(Selection(states=frozenset({state})), cursor="n:1:00")
    assert len(plans) == 10
    assert all("INDEX celery_idempotent_ended" in plan for plan in plans), plans


def test_pages_are_left_room_for_updates(filled: DjangoStore):
    found = rows(
        filled.alias,
        "SELECT reloptions FROM pg_class WHERE relname IN"
        " ('celery_idempotent_record', 'celery_idempotent_lease')",
    )
    assert found == [(["fillfactor=70"],)] * 2


def _tables(alias: str) -> set[str]:
    return {
        table
        for table in connections[alias].introspection.table_names()
        if table.startswith("celery_idempotent")
    }
