"""Eager runs in the caller's transaction: a record never says done of what is rolled back."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from celery import Celery

pytest.importorskip("django")

from django.db import OperationalError, connections, transaction

from celery_idempotent.django import IdempotentTask
from celery_idempotent.errors import InProgress
from celery_idempotent.records import State
from celery_idempotent.stores.memory import MemoryStore
from tests.sql import databases
from tests.sql.databases import execute, rows
from tests.support.waiting import wait_for


class Rollback(Exception):
    pass


class Shop:
    """An eager app whose tasks write one row each to a database; ``store`` keeps the records, there or elsewhere."""

    def __init__(self, alias: str, store: Any, *, lease: float = 60) -> None:
        self.alias = alias
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.update(
            task_always_eager=True, idempotency_store=store, idempotency_lease=lease
        )
        self.store = store
        self.pay = self.task("pay", lambda order: order)

    def task(self, name: str, then: Callable[[str], Any], **options: Any) -> Any:
        def body(order: str) -> Any:
            execute(self.alias, "INSERT INTO eager_effects VALUES (%s)", (order,))
            return then(order)

        make = self.app.task(
            base=IdempotentTask, name=name, shared=False, idempotency_key="order", **options
        )
        return make(body)

    def atomic(self, **options: Any) -> Any:
        return transaction.atomic(using=self.alias, **options)

    def effects(self, order: str = "order") -> int:
        return len(rows(self.alias, "SELECT 1 FROM eager_effects WHERE name = %s", (order,)))

    def state(self, task: Any = None, order: str = "order") -> State | None:
        record = (task or self.pay).idempotency_record(order)
        return None if record is None else record.state


@pytest.fixture
def open_shop(
    open_store: Callable[..., Any],
    make_table: Callable[..., None],
    request: pytest.FixtureRequest,
) -> Callable[..., Shop]:
    def open_(vendor: str, where: str = "beside", **options: Any) -> Shop:
        store = open_store(vendor)
        make_table(store.alias, "eager_effects", "name varchar(50)")
        kept: Any = store if where == "beside" else MemoryStore()
        if where == "redis":
            url, prefix = request.getfixturevalue("redis_url"), request.getfixturevalue("prefix")
            kept = f"{url}?prefix={prefix}"
        return Shop(store.alias, kept, **options)

    return open_


@pytest.fixture(
    params=[
        *((vendor, "beside") for vendor in databases.VENDORS),
        ("postgresql", "memory"),
        pytest.param(("postgresql", "redis"), marks=pytest.mark.redis),
    ],
    ids="-".join,
)
def shop(request: pytest.FixtureRequest, open_shop: Callable[..., Shop]) -> Shop:
    """With its records in the database that it writes to, and elsewhere."""
    return open_shop(*request.param, lease=1.5)


CALLS = {
    "apply": lambda task, order="order": task.apply((order,)),
    "delay": lambda task, order="order": task.delay(order),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_what_is_rolled_back_is_not_done_and_the_lease_ends_its_claim(shop: Shop, call: Any):
    with suppress(Rollback), shop.atomic():
        assert call(shop.pay).get() == "order"
        raise Rollback
    assert shop.effects() == 0
    if shop.alias == "sqlite_":  # where the record was a part of the transaction
        assert shop.state() is None
    else:
        assert shop.state() is State.PROCESSING
        with pytest.raises(InProgress):
            call(shop.pay).get()
        wait_for(lambda: call(shop.pay).state == "SUCCESS", 20, "the lease to end")
    assert call(shop.pay).get() == "order"
    assert (shop.effects(), shop.state()) == (1, State.COMPLETED)


def test_what_is_committed_is_done_and_its_key_is_held_before(shop: Shop):
    with shop.atomic():
        assert shop.pay.delay("order").get() == "order"
        if shop.alias != "sqlite_":  # where the record is a part of the transaction
            assert shop.state() is State.PROCESSING
            for call in CALLS.values():
                assert isinstance(call(shop.pay).result, InProgress)
    assert (shop.effects(), shop.state()) == (1, State.COMPLETED)
    assert shop.pay.delay("order").get() == "order"
    assert shop.effects() == 1


def test_a_savepoint_that_is_rolled_back_leaves_the_key_to_the_lease(
    open_shop: Callable[..., Shop],
):
    shop = open_shop("postgresql")
    with shop.atomic():
        with suppress(Rollback), shop.atomic():
            shop.pay.delay("order")
            raise Rollback
        assert shop.effects() == 0
    assert shop.state() is State.PROCESSING


@pytest.mark.parametrize("fails", [False, True])
def test_in_the_body_of_an_atomic_task_it_ends_as_that_does(
    open_shop: Callable[..., Shop], fails: bool
):
    shop = open_shop("postgresql")

    def place(order: str) -> str:
        assert shop.pay.delay(order).get() == order
        if fails:
            raise Rollback
        return order

    task = shop.task("place", place, idempotency_atomic=True)
    assert task.apply(("order",)).state == ("FAILURE" if fails else "SUCCESS")
    assert shop.effects() == (0 if fails else 2), "the row of each task"
    assert shop.state() is (State.PROCESSING if fails else State.COMPLETED)


def test_a_commit_whose_answer_is_lost_is_one_to_what_waits_for_it(
    open_shop: Callable[..., Shop], monkeypatch: pytest.MonkeyPatch
):
    shop = open_shop("postgresql")
    called: list[str] = []

    def then(order: str) -> None:
        assert shop.pay.apply((order,)).get() == order
        own: Any = connections[shop.alias]
        transaction.on_commit(lambda: called.append(order), using=shop.alias)
        commit = own._commit

        def unanswered() -> None:
            monkeypatch.undo()
            commit()
            own.connection.close()
            raise OperationalError("the answer is lost")

        monkeypatch.setattr(own, "_commit", unanswered)

    outer = shop.task("outer", then, idempotency_atomic=True)
    assert outer.apply(("order",)).state == "SUCCESS"
    assert called == ["order"]
    assert shop.state() is State.COMPLETED
    assert shop.pay.apply(("order",)).get() == "order"
    assert shop.effects() == 2, "one of each task"


def test_a_function_that_fails_after_the_commit_keeps_no_record_from_being_written(
    open_shop: Callable[..., Shop],
):
    """Django would not call those after it."""
    shop = open_shop("postgresql", "memory")

    def fail() -> None:
        raise Rollback

    with pytest.raises(Rollback), shop.atomic():
        transaction.on_commit(fail, using=shop.alias)
        shop.pay.delay("order")
    assert (shop.effects(), shop.state()) == (1, State.COMPLETED)


def test_two_databases_have_both_to_commit(open_shop: Callable[..., Shop]):
    shop, other = open_shop("postgresql", "memory"), open_shop("mariadb", "memory")
    with suppress(Rollback), other.atomic():
        with shop.atomic():
            shop.pay.delay("order")
        assert shop.state() is State.PROCESSING
        raise Rollback
    assert shop.state() is State.PROCESSING
    with other.atomic(), shop.atomic():
        shop.pay.delay("second")
    assert shop.state(order="second") is State.COMPLETED


def test_in_a_test_case_a_call_is_done_at_once(open_shop: Callable[..., Shop]):
    """Its own transaction stands for none."""
    shop = open_shop("postgresql", "memory")
    with ExitStack() as stack:
        for _ in ("of the class", "of the test"):
            block = shop.atomic()
            block._from_testcase = True
            stack.enter_context(block)
            stack.callback(transaction.set_rollback, True, using=shop.alias)
        shop.pay.delay("order")
        assert (shop.effects(), shop.state()) == (1, State.COMPLETED)
