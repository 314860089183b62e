"""A value that the server does not take is left out: the record is settled without it, and the task succeeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import State, Stored
from celery_idempotent.testing import deliver
from tests.sql.databases import rows
from tests.sql.verbs import claimed, end_of
from tests.support.servers import EmbeddedRedis

pytest.importorskip("django")

from celery_idempotent.django.store import DjangoStore

MIB = 1024 * 1024


class Shop:
    """An app whose task returns so many letters: PyMySQL sends each as two, in hexadecimal digits."""

    def __init__(self, url: str) -> None:
        self.runs: list[int] = []
        self.app = Celery("shop", broker="memory://", set_as_current=False)
        self.app.conf.update(
            result_backend="cache+memory://",
            idempotency_store=url,
            idempotency_max_result_bytes=64 * MIB,
            idempotency_lease=10,
        )

    def task(self, **options: Any) -> Any:
        @self.app.task(
            base=IdempotentTask, name="pay", shared=False, idempotency_key="order", **options
        )
        def pay(order: str, size: int) -> str:
            self.runs.append(size)
            return "x" * size

        return pay

    def pays_once(self, size: int, **options: Any) -> Any:
        """Deliver the call, and another one; return the record."""
        pay = self.task(**options)
        assert deliver(pay, "17", size).state == "SUCCESS"
        record = pay.idempotency_record("17")
        assert record.state is State.COMPLETED
        deliver(pay, "17", size)
        assert self.runs == [size]
        return record


@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
@pytest.mark.parametrize("size", [9 * MIB, 20 * MIB])
def test_a_result_larger_than_a_packet_of_mariadb_is_left_out(
    use_database: Callable[..., str],
    caplog: pytest.LogCaptureFixture,
    size: int,
    atomic: bool,
):
    alias = use_database("mariadb")
    assert rows(alias, "SELECT @@max_allowed_packet") == [(16 * MIB,)]
    record = Shop(f"django://{alias}").pays_once(size, idempotency_atomic=atomic)
    assert record.value is None
    assert "duplicates will look for it in the result backend" in caplog.text


@pytest.mark.parametrize("atomic", [False, True], ids=["", "atomic"])
def test_a_result_that_fits_is_kept(use_database: Callable[..., str], atomic: bool):
    alias = use_database("mariadb")
    record = Shop(f"django://{alias}").pays_once(6 * MIB, idempotency_atomic=atomic)
    assert len(record.value.body) == 6 * MIB + 2


def test_a_step_that_does_not_fit_is_refused_by_the_limit(open_store: Callable[..., DjangoStore]):
    store = open_store("mariadb")
    record, large = claimed(store), Stored("text/plain", "binary", b"x" * 9 * MIB)
    with pytest.raises(
        StoreMisconfigured, match="bytes, more than half of the server's max_allowed"
    ):
        store.checkpoint(record.identity, token=record.token, name="s", value=large)
    assert store.settle(end_of(record))


def test_an_idle_connection_keeps_no_result(open_store: Callable[..., DjangoStore]):
    store = open_store("postgresql")
    assert store.settle(end_of(claimed(store)))
    assert {session.cursor for session in store.connections._idle} == {None}


@pytest.fixture
def small_redis(private_redis: EmbeddedRedis) -> Iterator[str]:
    """A server that accepts no string of more than a MiB."""
    with redis.Redis.from_url(private_redis.url()) as client:
        client.config_set("proto-max-bulk-len", MIB)
        yield private_redis.url()
        client.config_set("proto-max-bulk-len", 512 * MIB)


@pytest.mark.redis
def test_a_result_larger_than_redis_accepts_is_left_out(small_redis: str):
    assert Shop(small_redis).pays_once(2 * MIB).value is None
