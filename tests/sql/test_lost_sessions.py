"""A session that the server ended is lost, whatever the server calls that, and is replaced by a new one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.testing import deliver_at_once

pytest.importorskip("django")

from django.db import DatabaseError, InternalError, OperationalError, connections
from django.db.backends.signals import connection_created

from celery_idempotent.django.sql.connections import Connections, Session
from celery_idempotent.django.sql.dialects import kind
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.stores import get_store
from tests.sql.databases import execute, rows
from tests.sql.verbs import claim, claimed, end_of


def test_a_database_that_is_away_is_asked_once_more(
    use_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    """The first loss may be that of an idle session; after the second the caller decides when to try again."""
    alias = use_database("postgresql")
    connections.databases[alias]["PORT"] = "1"
    connections[alias].close()
    del connections[alias]
    tries, new = list[Connections](), Connections._new

    def connect(own: Connections) -> Session:
        tries.append(own)
        assert len(tries) < 5
        return new(own)

    monkeypatch.setattr(Connections, "_new", connect)
    with pytest.raises(StoreUnavailable):
        claim(DjangoStore(alias))
    assert len(tries) == 2


def test_a_transaction_that_was_idle_for_too_long_is_a_lost_session(
    use_database: Callable[..., str],
):
    """PostgreSQL says so in the next statement, which is that of the settle."""
    alias = use_database("postgresql")
    store = DjangoStore(alias)
    record = claimed(store)
    with pytest.raises(DatabaseError) as caught, store.transaction(record) as run:
        execute(alias, "SET idle_in_transaction_session_timeout = 50")
        time.sleep(0.5)  # the time limit is the server's
        run.settle(end_of(record))
    assert run.is_transient(caught.value, at_end=True)
    with store.transaction(record) as run:
        assert run.settle(end_of(record))
    store.close()


@pytest.mark.parametrize(
    ("vendor", "code"),
    [
        *(("postgresql", code) for code in ("25P03", "25P04", "57P05", "57P01", "08006")),
        *(("mysql", code) for code in (1153, 1290, 2006, 2013, 4031)),
    ],
)
def test_what_ends_a_session_is_known_by_its_code(vendor: str, code: Any):
    error: Any = OperationalError(code, "gone") if vendor == "mysql" else InternalError("gone")
    if vendor == "postgresql":
        error.sqlstate = code
    assert kind(error, vendor) == "lost"


def test_deliveries_at_once_leave_no_connection_open(
    use_database: Callable[..., str], monkeypatch: pytest.MonkeyPatch
):
    # The heartbeat's thread writes what they counted when it is time, with a connection of the store.
    monkeypatch.setattr(DjangoStore, "supports_counting", False)
    alias = use_database("postgresql")
    app = Celery("shop", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(idempotency_store=f"django://{alias}")

    @app.task(base=IdempotentTask, name="pay", shared=False, idempotency_key="order")
    def pay(order: str) -> int:
        return len(rows(alias, "SELECT 1"))

    opened: list[Any] = []

    def note(connection: Any, **_: object) -> None:
        if connection.alias == alias:
            opened.append(connection)

    connections[alias].close()
    connection_created.connect(note)
    try:
        assert len(deliver_at_once(pay, 3, "17")) == 3
    finally:
        connection_created.disconnect(note)
    get_store(app).close()
    assert opened
    assert [each for each in opened if each.connection is not None] == []
