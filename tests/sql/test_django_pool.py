"""Django's own connection pool (``OPTIONS["pool"]``): the store's connections are none of it, in whatever process."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import psutil
import pytest
from celery import Celery

from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Renewal,
    SettleRequest,
    State,
    Stored,
)
from tests.sql import databases
from tests.support.ledger import Ledger
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytest.importorskip("psycopg_pool")
pytest.importorskip("django")

import django
from django.db import connections

from celery_idempotent.django.store import DjangoStore

pytestmark = pytest.mark.skipif(django.VERSION < (5, 1), reason="Django has no pool")

KEY = Identity(namespace="pay", key="order-17")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
PATIENCE = 60
#: How many connections the pool of a process opens at once: more than the store ever keeps.
POOL = {"min_size": 6, "max_size": 6}
KILLS = 6


@pytest.fixture
def pooled(use_database: Callable[..., str]) -> Callable[..., str]:
    """A function that gives an alias with a pool of Django's."""

    def pooled(**pool: Any) -> str:
        return use_database("postgresql", CONN_MAX_AGE=0, options={"pool": pool})

    return pooled


def test_one_connection_in_the_pool_is_enough_for_an_atomic_run(pooled):
    """It belongs to the task: a renewal, a step and a second claim meanwhile do not wait for it."""
    store = DjangoStore(pooled(min_size=1, max_size=1, timeout=5))
    asked: Any = {"lease_ms": 60_000, "keep_ms": 60_000}
    record = store.claim(ClaimRequest(identity=KEY, attempt=os.urandom(8), **asked)).record
    try:
        with store.transaction(record) as run:
            assert store.renew([Renewal(identity=KEY, token=record.token, **asked)]) == [True]
            assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE)
            other = Identity(namespace="pay", key="order-18")
            assert isinstance(
                store.claim(ClaimRequest(identity=other, attempt=os.urandom(8), **asked)), Claimed
            )
            assert run.settle(
                SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=60_000)
            )
        assert store.get(KEY).state is State.COMPLETED
    finally:
        store.close()
        connections[store.alias].close_pool()


def test_a_verb_opens_no_pool(pooled):
    """A worker's main process asks the store when it buries a child, and forks the next one after that."""
    store = DjangoStore(pooled(**POOL))
    connections[store.alias].close()
    connections[store.alias].close_pool()
    try:
        assert store.get(KEY) is None
        assert store.alias not in connections[store.alias]._connection_pools
    finally:
        store.close()


@pytest.mark.worker
@pytest.mark.rabbitmq
def test_children_that_are_killed_leave_no_pool_to_those_that_are_forked_after_them(
    pooled: Callable[..., str],
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq_url: str,
    rabbitmq_queue: str,
    redis_url: str,
    prefix: str,
):
    """The main process interrupts the claims of the dead ones, and the next child inherits what that has opened."""
    alias = pooled(**POOL)
    for table in ("effects", "accounts"):
        databases.execute(alias, f"DROP TABLE IF EXISTS {table}")
    databases.execute(
        alias, "CREATE TABLE effects (id bigserial PRIMARY KEY, name varchar(200), token bigint)"
    )
    conf = {
        "broker_url": rabbitmq_url,
        "result_backend": redis_url,
        "result_backend_transport_options": {"global_keyprefix": prefix},
        "idempotency_store": "django://",
        "idempotency_lease": 30,
        "task_default_queue": rabbitmq_queue,
    }
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.sql.atomic_settings",
        "ATOMIC_DATABASES": json.dumps({"default": connections.databases[alias]}),
        "ATOMIC_CONF": json.dumps(conf),
    }
    worker = start_worker("tests.sql.atomic_app", env=env, concurrency=2, queues=[rabbitmq_queue])
    client = Celery("till", set_as_current=False)
    client.conf.update(conf)
    keys = [f"order-{n}" for n in range(KILLS * 5)]
    for key in keys[::5]:
        (ledger.path.parent / f"kill-{key}").write_text("6")
    try:
        results = {key: client.send_task("pay", (key,)) for key in keys}
        for key, result in results.items():
            assert result.get(timeout=PATIENCE) == f"paid {key}"
        killed = [key for key in keys if (ledger.path.parent / f"killed-{key}").exists()]
        assert len(killed) == KILLS
        paid = databases.rows(alias, "SELECT name, count(*) FROM effects GROUP BY name")
        assert dict(paid) == {name: 1 for key in keys for name in (key, f"{key} again")}
        assert worker.log.count("is INTERRUPTED (crash") >= KILLS
        # One that a burial is using may be in sight for a moment.
        wait_for(lambda: _sessions(worker.pid) <= 2, PATIENCE, "the main process to have no pool")
    finally:
        client.close()
        connections[alias].close_pool()  # type: ignore[attr-defined]


def _sessions(pid: int) -> int:
    """How many connections a process has with PostgreSQL, its own or inherited."""
    port = int(connections.databases["test_postgresql_0"]["PORT"] or 5432)
    found = psutil.Process(pid).net_connections()
    return sum(getattr(each.raddr, "port", None) == port for each in found)
