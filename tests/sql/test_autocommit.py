"""``DATABASES[…]["AUTOCOMMIT"] = False``: the project commits its own work, and the store commits the store's."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

from celery_idempotent.django import IdempotentTask
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import (
    Claimed,
    ClaimRequest,
    Identity,
    Record,
    Settled,
    SettleRequest,
    State,
    Stored,
)
from celery_idempotent.stores import get_store
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.support.ledger import Ledger
from tests.support.waiting import wait_for
from tests.support.workers import Worker

pytest.importorskip("django")

from django.db import connections, transaction

from celery_idempotent.django.store import DjangoStore

KEY = Identity(namespace="charge", key="order-17")
VALUE = Stored(content_type="application/json", content_encoding="utf-8", body=b"17")
PATIENCE = 60


@pytest.fixture(params=databases.VENDORS)
def manual(
    request: pytest.FixtureRequest, use_database: Callable[..., str]
) -> Iterator[tuple[DjangoStore, str]]:
    """A store in a database where nothing commits by itself, and an alias that sees what was committed."""
    judge = use_database(request.param)
    execute(judge, "DROP TABLE IF EXISTS effects")
    execute(judge, "DROP TABLE IF EXISTS effects")
    execute(judge, "CREATE TABLE effects (n integer)")
    alias = use_database(request.param, AUTOCOMMIT=False)
    connections[alias].rollback()
    connections[alias].close()
    store = DjangoStore(alias)
    yield store, judge
    store.close()
    connections[alias].close()
    execute(judge, "DROP TABLE effects")


def claimed(store: DjangoStore) -> Record:
    answer = store.claim(
        ClaimRequest(identity=KEY, attempt=os.urandom(8), lease_ms=60_000, keep_ms=60_000)
    )
    assert isinstance(answer, Claimed)
    return answer.record


def states(judge: str) -> list[tuple[Any, ...]]:
    return rows(judge, "SELECT state FROM celery_idempotent_record")


def test_every_verb_is_committed(manual):
    store, judge = manual
    record = claimed(store)
    assert states(judge) == [("P",)]
    assert store.settle(
        SettleRequest(record=record, state=State.COMPLETED, value=VALUE, keep_ms=60_000)
    )
    assert states(judge) == [("C",)]
    assert store.mark_delivered(KEY, token=record.token)
    store.count({("an autocommit task", "claimed"): 1})
    assert rows(judge, "SELECT delivered FROM celery_idempotent_record")[0][0]
    # The heartbeat may write what an earlier test counted.
    counted = "SELECT count FROM celery_idempotent_counter WHERE task = 'an autocommit task'"
    assert rows(judge, counted) == [(1,)]
    assert store.forget(KEY)
    assert states(judge) == []


def test_an_atomic_run_is_committed_with_its_record(manual):
    store, judge = manual
    with store.transaction(claimed(store)) as run:
        execute(store.alias, "INSERT INTO effects VALUES (1)")
        assert run.settle(
            SettleRequest(record=run.record, state=State.COMPLETED, value=VALUE, keep_ms=60_000)
        )
    assert rows(judge, "SELECT n FROM effects") == [(1,)]
    assert states(judge) == [("C",)]
    answer = store.claim(
        ClaimRequest(identity=KEY, attempt=os.urandom(8), lease_ms=60_000, keep_ms=60_000)
    )
    assert isinstance(answer, Settled)


def test_after_an_atomic_run_nothing_commits_by_itself(manual):
    store, judge = manual
    record = claimed(store)
    with pytest.raises(ZeroDivisionError), store.transaction(record):
        execute(store.alias, "INSERT INTO effects VALUES (1)")
        raise ZeroDivisionError
    execute(store.alias, "INSERT INTO effects VALUES (2)")
    connections[store.alias].rollback()
    assert rows(judge, "SELECT n FROM effects") == []
    execute(store.alias, "INSERT INTO effects VALUES (3)")
    transaction.commit(using=store.alias)
    assert rows(judge, "SELECT n FROM effects") == [(3,)]


def test_an_atomic_run_is_refused_while_a_transaction_is_open(manual):
    store, judge = manual
    record = claimed(store)
    execute(store.alias, "INSERT INTO effects VALUES (1)")
    with pytest.raises(StoreMisconfigured, match="AUTOCOMMIT"), store.transaction(record):
        pytest.fail("it began")
    transaction.commit(using=store.alias)
    assert rows(judge, "SELECT n FROM effects") == [(1,)]


def test_the_outbox_is_swept_once(manual):
    """What a dead process has committed and not sent is sent, and the message is gone for good."""
    from celery_idempotent.django import outbox
    from celery_idempotent.django.outbox import rows as outbox_rows

    store, judge = manual
    app = Celery("till", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = f"django://{store.alias}"
    sent: list[str] = []

    @app.task(base=IdempotentTask, name="follow", shared=False)
    def follow(key: str) -> None: ...

    try:
        with transaction.atomic(using=store.alias):
            outbox.stage(follow, ("order-17",), using=store.alias)
        transaction.commit(using=store.alias)
        connections[store.alias].close()  # as a process that dies
        execute(judge, "UPDATE celery_idempotent_outbox SET due_ms = 0")
        follow.send_deferred = lambda call: sent.append(call.args[0])  # type: ignore[attr-defined]
        assert outbox.sweep(app, using=store.alias).sent == 1
        assert outbox_rows.rows(judge).count() == 0
        assert outbox.sweep(app, using=store.alias).sent == 0
        assert sent == ["order-17"]
    finally:
        get_store(app).close()
        app.close()


def test_a_request_is_queued_at_once_though_its_own_work_is_committed_later(manual):
    """The message is no part of a transaction that nobody knows the end of: it is sent, or left to the sweep."""
    from django.test import RequestFactory

    from celery_idempotent.django.http import enqueue

    store, judge = manual
    app = Celery("till", broker="memory://", set_as_current=False)
    app.conf.idempotency_store = f"django://{store.alias}"

    @app.task(base=IdempotentTask, name="charge", shared=False)
    def charge(n: int) -> None: ...

    sent: list[str] = []
    charge.apply_async = lambda *_, task_id, **__: sent.append(task_id)  # type: ignore[method-assign]
    execute(store.alias, "INSERT INTO effects VALUES (1)")
    try:
        request = RequestFactory().post("/", HTTP_IDEMPOTENCY_KEY='"order-17"')
        answer = enqueue(request, charge, (1,), scope="me", using=store.alias)
        assert answer.status_code == 202
        connections[store.alias].rollback()
        # On SQLite it was part of that transaction; the message claims its key when it arrives.
        assert states(judge) == ([] if connections[judge].vendor == "sqlite" else [("Q",)])
        assert len(sent) == 1
        assert rows(judge, "SELECT count(*) FROM celery_idempotent_outbox") == [(0,)]
    finally:
        get_store(app).close()
        app.close()


@pytest.mark.worker
@pytest.mark.rabbitmq
def test_workers_that_are_killed_after_the_end_leave_one_effect(
    use_database: Callable[..., str],
    start_worker: Callable[..., Worker],
    ledger: Ledger,
    rabbitmq_url: str,
    rabbitmq_queue: str,
    redis_url: str,
    prefix: str,
):
    alias = use_database("postgresql")
    execute(alias, "DROP TABLE IF EXISTS effects")
    execute(alias, "DROP TABLE IF EXISTS effects")
    execute(alias, "CREATE TABLE effects (name varchar(200), token bigint)")
    conf = {
        "broker_url": rabbitmq_url,
        "result_backend": redis_url,
        "result_backend_transport_options": {"global_keyprefix": prefix},
        "idempotency_store": "django://",
        "task_default_queue": rabbitmq_queue,
    }
    settings = {**connections.databases[alias], "AUTOCOMMIT": False}
    env = {
        "DJANGO_SETTINGS_MODULE": "tests.sql.atomic_settings",
        "ATOMIC_DATABASES": json.dumps({"default": settings}),
        "ATOMIC_CONF": json.dumps(conf),
    }
    client = Celery("till", set_as_current=False)
    client.conf.update(conf)
    try:
        for _ in range(2):
            worker = start_worker("tests.sql.atomic_app", env=env, queues=[rabbitmq_queue])
            for task in ("pay", "follow"):
                result = client.send_task(task, ("order",), task_id=f"the {task}")
                assert result.get(timeout=PATIENCE) == "paid order"
            wait_for(lambda: ledger.count("followed") >= 2, PATIENCE, "what was staged")
            worker.kill()
        assert len(rows(alias, "SELECT name FROM effects")) == 2
        assert ledger.count("inside") == 1
        # The one that was staged, and the one that was sent.
        assert ledger.count("followed") == 2
        assert rows(alias, "SELECT count(*) FROM celery_idempotent_outbox") == [(0,)]
    finally:
        client.close()
