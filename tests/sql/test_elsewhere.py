"""Writes in another thread than the body's of an atomic task are outside of its transaction, and refused."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("django")

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections, transaction

from celery_idempotent import current_claim
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


def in_thread(do: Callable[[], object]) -> None:
    context = contextvars.copy_context()
    raised: list[Exception] = []

    def work() -> None:
        try:
            context.run(do)
        except Exception as error:  # noqa: BLE001  handed on
            raised.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]


WAYS: dict[str, Callable[[Callable[[], object]], object]] = {
    "the async ORM": lambda do: asyncio.run(sync_to_async(do)()),
    "to_thread": lambda do: asyncio.run(asyncio.to_thread(do)),
    "a thread with the body's context": in_thread,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_a_write_there_is_refused_and_all_is_rolled_back(shop: Shop, way: Any):
    """Also by a thread that had its connection before."""
    for _ in range(2):
        error = shop.run(lambda: way(closing(shop, shop.write)))
        assert isinstance(error, IdempotencyError)
        assert "asyncio.run()" in str(error)
        assert shop.rows() == []
        way(closing(shop, shop.look))


def test_async_to_sync_works_in_the_bodys_thread(shop: Shop):
    shop.fails = True

    async def work() -> None:
        await sync_to_async(shop.write)()

    assert isinstance(shop.run(async_to_sync(work)), ZeroDivisionError)
    assert shop.rows() == []
    shop.fails = False
    assert shop.run(async_to_sync(work)) is None
    assert shop.rows() == ["ours", "theirs"]


@pytest.mark.parametrize("shop", SERVERS, indirect=True)
def test_what_reads_there_and_the_verbs_of_the_claim_are_let_through(shop: Shop):
    seen: list[Any] = []

    def work() -> None:
        claim = current_claim()
        assert claim is not None
        seen.append(shop.look())
        claim.ensure()

    assert shop.run(lambda: asyncio.run(asyncio.to_thread(closing(shop, work)))) is None
    assert seen == [0], "nothing of the transaction"
    assert shop.rows() == ["ours"]


@pytest.mark.parametrize("shop", SERVERS, indirect=True)
def test_a_step_may_write_there_for_its_result_is_kept_too(shop: Shop):

    def write() -> None:
        asyncio.run(asyncio.to_thread(closing(shop, shop.write)))

    def body() -> None:
        claim = current_claim()
        assert claim is not None
        claim.step("write", write)

    shop.fails = True
    assert isinstance(shop.run(body), ZeroDivisionError)
    shop.fails = False
    assert shop.run(body) is None
    assert shop.rows() == ["ours", "theirs"]


def test_a_message_cannot_be_staged_from_there(shop: Shop):
    """It would be on its way whatever becomes of the transaction."""
    publish = closing(shop, shop.follow.delay_on_commit)
    error = shop.run(lambda: asyncio.run(asyncio.to_thread(publish)))
    assert isinstance(error, IdempotencyError)
    assert "another thread" in str(error)
    assert rows(shop.alias, "SELECT 1 FROM celery_idempotent_outbox") == []


def test_a_wrapper_of_somebody_elses_is_taken_away_and_not_ours(shop: Shop):
    """A connection that is opened within ``execute_wrapper`` gets the guard meanwhile."""
    calls: list[str] = []

    def note(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        calls.append(sql)
        return execute(sql, params, many, context)

    connections[shop.alias].close()
    connections[shop.alias].execute_wrappers.clear()
    with connections[shop.alias].execute_wrapper(note):
        execute(shop.alias, "SELECT 1")
    with transaction.atomic(using=shop.alias):
        execute(shop.alias, "SELECT 2")
    assert calls[-1] == "SELECT 1"
    assert len(connections[shop.alias].execute_wrappers) == 1
