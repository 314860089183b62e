"""What another thread than the body's of an atomic task does is no part of its transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("django")

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections

from celery_idempotent.django import IdempotentTask
from celery_idempotent.errors import IdempotencyError
from tests.sql import databases
from tests.sql.databases import execute, rows

#: On SQLite another connection waits for the end of the transaction.
SERVERS = ("postgresql", "mariadb")
INSERT = "INSERT INTO elsewhere VALUES ('theirs')"


class Shop:
    """An atomic task that writes one row, does what it is told to, and may fail after that."""

    def __init__(self, store: Any) -> None:
        self.alias: str = store.alias
        app = Celery("shop", broker="memory://", set_as_current=False)
        app.conf.idempotency_store = store
        self.then: Callable[[], object] = lambda: None
        self.fails = False

        @app.task(
            base=IdempotentTask,
            shared=False,
            name="pay",
            idempotency_key="order",
            idempotency_atomic=True,
        )
        def pay(order: str) -> None:
            execute(self.alias, "INSERT INTO elsewhere VALUES ('ours')")
            self.then()
            if self.fails:
                raise ZeroDivisionError

        @app.task(base=IdempotentTask, shared=False, name="follow")
        def follow() -> None: ...

        self.pay = pay
        self.follow = follow

    def run(self, then: Callable[[], object]) -> Any:
        self.then = then
        return self.pay.apply(("order",)).result

    def write(self) -> None:
        execute(self.alias, INSERT)

    def look(self) -> int:
        """What another session sees; leaves no connection behind in its thread."""
        return len(rows(self.alias, "SELECT name FROM elsewhere"))

    def rows(self) -> list[str]:
        return sorted(name for (name,) in rows(self.alias, "SELECT name FROM elsewhere"))


@pytest.fixture(params=databases.KINDS)
def shop(request: pytest.FixtureRequest, open_store: Callable[..., Any]) -> Iterator[Shop]:
    store = open_store(request.param)
    execute(store.alias, "CREATE TABLE elsewhere (name varchar(50))")
    yield Shop(store)
    connections[store.alias].close()
    execute(store.alias, "DROP TABLE elsewhere")
    connections[store.alias].close()


def closing(shop: Shop, do: Callable[[], Any]) -> Callable[[], Any]:
    """Close the thread's connection after it."""

    def done() -> Any:
        try:
            return do()
        finally:
            connections[shop.alias].close()

    return done


def test_async_to_sync_works_in_the_bodys_thread(shop: Shop):
    shop.fails = True

    async def work() -> None:
        await sync_to_async(shop.write)()

    assert isinstance(shop.run(async_to_sync(work)), ZeroDivisionError)
    assert shop.rows() == []
    shop.fails = False
    assert shop.run(async_to_sync(work)) is None
    assert shop.rows() == ["ours", "theirs"]


def test_a_message_cannot_be_staged_from_there(shop: Shop):
    """It would be on its way whatever becomes of the transaction."""
    publish = closing(shop, shop.follow.delay_on_commit)
    error = shop.run(lambda: asyncio.run(asyncio.to_thread(publish)))
    assert isinstance(error, IdempotencyError)
    assert "another thread" in str(error)
    assert rows(shop.alias, "SELECT 1 FROM celery_idempotent_outbox") == []
