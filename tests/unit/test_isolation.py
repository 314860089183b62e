"""``isolated_records``: what a test leaves is gone with it, wherever the app keeps its records."""

from __future__ import annotations

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import InvalidOption
from celery_idempotent.stores import get_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import isolated_records
from tests.support.programs import run

#: Nobody is there.
NOWHERE = "redis://127.0.0.1:1/0"


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
