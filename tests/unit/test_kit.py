"""The test kit: records of one test alone, deliveries in this process, and runs that are killed after each line."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores import get_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import (
    crash_matrix,
    deliver,
    deliver_at_once,
    deliver_message,
    deliver_twice,
    idempotency_off,
    isolated_records,
    lose_worker,
)
from tests.support.programs import run

#: Nobody is there.
NOWHERE = "redis://127.0.0.1:1/0"


class Bank:
    """Charges are files: what one process does, all see. With a key of its own, a repeated charge is the first one."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def charge(self, order: str, key: str = "") -> str:
        name = f"{order}.{key or os.urandom(4).hex()}"
        (self.directory / name).touch()
        return name

    def charges(self, order: str) -> int:
        return len(list(self.directory.glob(f"{order}.*")))


@pytest.fixture
def bank(tmp_path: Path) -> Bank:
    return Bank(tmp_path)


@pytest.fixture
def app() -> Iterator[Celery]:
    app = Celery("shop", set_as_current=False)
    app.conf.update(
        broker_url="memory://",
        result_backend="cache+memory://",
        idempotency_store=NOWHERE,
        task_always_eager=True,
    )
    with isolated_records(app):
        yield app
    app.close()


@pytest.fixture
def task(app: Celery) -> Callable[..., Any]:
    """A function that makes a task of a function, with the first argument as its key."""

    def make(function: Callable[..., Any], **options: Any) -> Any:
        options = {"idempotency_key": "order", "bind": True, "shared": False, **options}
        return app.task(base=IdempotentTask, name=f"shop.{function.__name__}", **options)(function)

    return make


@pytest.fixture
def pay(task: Callable[..., Any], bank: Bank) -> Any:
    def pay(order: str) -> str:
        return bank.charge(order)

    return task(pay, bind=False)


class TestDeliveries:
    def test_what_the_task_publishes_goes_nowhere_and_is_shown(self, app, task):
        def follow(order: str) -> None:
            """Nothing."""

        later = task(follow, bind=False)

        def pay(self: Any, order: str) -> None:
            later.delay(order)

        (message,) = deliver(task(pay), "o1").published
        assert (message.task, message.args) == (later.name, ["o1"])

    def test_switched_off_both_run(self, app, pay, bank):
        with idempotency_off(app):
            deliver_twice(pay, "o1")
        assert bank.charges("o1") == 2
        deliver_twice(pay, "o2")
        assert bank.charges("o2") == 1


def careless(bank: Bank) -> Callable[..., Any]:
    def careless(self: Any, order: str) -> str:
        name = order.upper()
        charged = bank.charge(order)
        name += charged
        return name

    return careless


class TestSignatures:
    """They bring what a call takes beside its arguments: a key, a scope."""

    def test_a_key_is_given_with_the_call(self, task, bank):
        def charge(order: str) -> Any:
            return bank.charge(order)

        charged = task(charge, idempotency_key=None, bind=False)
        call = charged.s("o-1").set(idempotency_key="click-1")
        first, second = deliver_twice(call)
        assert first.value == second.value
        assert deliver(call).value == first.value
        assert len(deliver_at_once(call, 2)) == 2
        assert bank.charges("o-1") == 1

    def test_a_retry_that_was_published_is_delivered(self, task, bank):
        def charge(self: Any, order: str) -> Any:
            if not self.request.retries:
                raise self.retry(countdown=5)
            return bank.charge(order)

        charged = task(charge)
        first = deliver(charged, "o-1")
        assert first.state == "RETRY"
        assert deliver_message(charged, first.published[0]).state == "SUCCESS"
        assert bank.charges("o-1") == 1


class TestCrashMatrix:
    def test_effects_that_nobody_outside_of_the_process_sees_are_a_mistake(self, task):
        charges: list[str] = []

        def private(self: Any, order: str) -> None:
            charges.append(order)

        with pytest.raises(AssertionError, match=r"before and after a run of shop\.private"):
            crash_matrix(
                task(private), arguments=lambda name: [name], effects=lambda _: len(charges)
            )


class TestLostWorkers:
    @pytest.mark.parametrize(
        ("at", "charges"), [("start", 1), ("end", 2), ("acknowledge", 1)], ids=str
    )
    def test_its_message_is_delivered_again(self, task, bank, at, charges):
        assert lose_worker(task(careless(bank)), "o1", at=at).state == "SUCCESS"
        assert bank.charges("o1") == charges

    def test_a_line_that_is_never_reached_is_a_mistake(self, task, bank):
        with pytest.raises(AssertionError, match="ended without reaching 1"):
            lose_worker(task(careless(bank)), "o1", at=1)


@pytest.fixture
def shop(runs: list[str]) -> Celery:
    app = Celery("shop", set_as_current=False)
    app.conf.update(idempotency_store=NOWHERE, task_always_eager=True)

    @app.task(base=IdempotentTask, name="pay", idempotency_key="order", shared=False)
    def pay(order: str) -> int:
        runs.append(order)
        return len(runs)

    return app


def test_an_app_that_has_no_store_yet_has_one_meanwhile(shop, runs):
    shop.conf.idempotency_store = None
    with isolated_records(shop):
        assert shop.tasks["pay"].delay("order-17").get() == 1
    with isolated_records(shop):
        assert shop.tasks["pay"].delay("order-17").get() == 2


def test_a_bad_setting_is_not_hidden(shop):
    shop.conf.idempotency_store = "nonsense://"
    with pytest.raises(InvalidOption), isolated_records(shop):
        pass


def test_blocks_may_be_nested_and_end_with_a_test_that_fails(shop):
    usual = get_store(shop)
    with isolated_records(shop) as outer:
        assert isinstance(outer, MemoryStore)
        with isolated_records(shop) as inner:
            assert get_store(shop) is inner is not outer
        assert get_store(shop) is outer
        with pytest.raises(ZeroDivisionError), isolated_records(shop):
            raise ZeroDivisionError
        assert get_store(shop) is outer
    assert get_store(shop) is usual


def test_what_django_undoes_stays_in_its_database_and_the_cache_before_it_is_left_out():
    pytest.importorskip("django")
    code = (
        "import sys\n"
        "sys.modules['pytest'] = None\n"  # it needs none
        "from django.conf import settings\n"
        "settings.configure(DATABASES={'default':"
        " {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}})\n"
        "from celery import Celery\n"
        "from celery_idempotent.stores import get_store\n"
        "from celery_idempotent.testing import FakeClock, isolated_records\n"
        f"for url in 'django://', 'hybrid+{NOWHERE}?truth=default':\n"
        "    app = Celery('shop', set_as_current=False)\n"
        "    app.conf.idempotency_store = url\n"
        "    with isolated_records(app) as store:\n"
        "        print(repr(store), get_store(app) is store)\n"
    )
    done = run("-W", "error", "-c", code)
    assert done.stdout.splitlines() == ["<DjangoStore: default> True"] * 2
