"""DjangoStore keeps the contract, on every database and at every isolation level."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from celery_idempotent.stores import Store
from tests.contract import StoreContract

pytest.importorskip("django")

from tests.sql.databases import shift, stop


class SQLContract(StoreContract):
    vendor: str
    level = ""
    many = 12  # each thread has a connection of its own

    @pytest.fixture
    def store(self, open_store: Callable[..., Store]) -> Store:
        return open_store(self.vendor, self.level)

    @pytest.fixture
    def advance(self, store: Store) -> Callable[[float], None]:
        return lambda ms: shift(store, ms)

    @pytest.fixture
    def stop_at(self, store: Store) -> Callable[[int], None]:
        return lambda ms: stop(store, ms * 1000)


class AtOnce(SQLContract):
    """Of the contract, what several do at once: all else is the same at every isolation level."""

    def __init_subclass__(cls) -> None:
        for name in dir(StoreContract):
            if name.startswith("test_") and "at_once" not in name:
                setattr(cls, name, None)


class TestSQLite(SQLContract):
    vendor = "sqlite"


class TestPostgreSQL(SQLContract):
    """At READ COMMITTED, which is PostgreSQL's own choice."""

    vendor = "postgresql"
    few_cells = True


class TestMariaDB(SQLContract):
    """At READ COMMITTED, which is Django's choice."""

    vendor = "mariadb"
    few_cells = True


@pytest.mark.wide
class TestOtherLevels(AtOnce):
    @pytest.fixture(
        params=[
            f"{vendor} {level}"
            for vendor in ("postgresql", "mariadb")
            for level in ("repeatable read", "serializable")
        ]
    )
    def store(self, request: pytest.FixtureRequest, open_store: Callable[..., Store]) -> Store:
        return open_store(*request.param.split(" ", 1))
