"""Fixtures for SQL stores: one database of each kind a session, with the tables in it."""

from __future__ import annotations

import contextlib
import copy
import os
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("django")

from celery_idempotent.django.sql.dialects import dialect_of
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.signals import counters
from tests.sql import databases
from tests.support.debian import program
from tests.support.servers import need
from tests.support.waiting import wait_for

Databases = Callable[[str], dict[str, Any]]


@pytest.fixture(scope="session")
def sql_databases(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Databases]:
    """A function that gives the settings of the session's database of a vendor, made when asked for."""
    made: dict[str, dict[str, Any] | None] = {}
    with ExitStack() as stack:
        directory = tmp_path_factory.mktemp("sql")
        stack.enter_context(databases.ready(directory))

        def settings(vendor: str) -> dict[str, Any]:
            if vendor not in made:
                made[vendor] = None
                if databases.available(vendor):
                    found = stack.enter_context(databases.database(vendor, directory))
                    made[vendor] = found
                    alias = databases.add_alias(f"tables_{vendor}", copy.deepcopy(found))
                    databases.migrate(alias)
                    databases.drop_alias(alias)
            need(made[vendor], f"a {vendor} server")
            return copy.deepcopy(made[vendor]) or {}

        yield settings


@pytest.fixture(scope="session")
def _aliases(sql_databases: Databases) -> Iterator[dict[str, DjangoStore]]:
    stores: dict[str, DjangoStore] = {}
    yield stores
    counters.counts.clear()  # or they are written when the aliases are gone
    for alias, store in stores.items():
        store.close()
        databases.drop_alias(alias)


@pytest.fixture
def open_store(
    sql_databases: Databases, _aliases: dict[str, DjangoStore]
) -> Callable[..., DjangoStore]:
    """A function that gives a store in the session's database of a vendor, empty, at its own time.

    For each isolation level there is one, whose connections stay open from test to test.
    """

    from django.db import connections

    def open_(vendor: str, level: str = "") -> DjangoStore:
        alias = f"{vendor}_{level}".replace(" ", "_")
        if alias not in _aliases:
            settings = sql_databases(vendor)
            if level:
                settings.setdefault("OPTIONS", {}).update(databases.isolation(vendor, level))
            _aliases[alias] = DjangoStore(databases.add_alias(alias, settings))
        own = connections[alias]
        if own.connection is not None and not own.is_usable():
            own.close()  # another test ended every session there was
        store = _aliases[alias]
        counters.counts.pop(store, None)  # or the heartbeat writes those of an earlier test
        databases.clear(alias)
        store.connections.session_of(own).dialect.now_us = dialect_of(own.vendor).now_us
        return store

    return open_


@pytest.fixture
def use_database(sql_databases: Databases) -> Iterator[Callable[..., str]]:
    """A function that gives a new alias for the session's database of a vendor, empty."""
    used: list[str] = []

    def use(vendor: str, alias: str = "", **changes: Any) -> str:
        settings = sql_databases(vendor)
        settings.setdefault("OPTIONS", {}).update(changes.pop("options", {}))
        settings.update(changes)
        alias = databases.add_alias(alias or f"test_{vendor}_{len(used)}", settings)
        used.append(alias)
        databases.clear(alias)
        return alias

    yield use
    counters.counts.clear()  # or they are written when the aliases are gone
    for alias in used:
        databases.drop_alias(alias)


@pytest.fixture
def make_table() -> Iterator[Callable[[str, str, str], None]]:
    """A function that makes a table of the test's own in the database of an alias."""
    from django.db import connections

    made: list[tuple[str, str]] = []

    def make(alias: str, table: str, columns: str) -> None:
        databases.execute(alias, f"CREATE TABLE {table} ({columns})")
        made.append((alias, table))

    yield make
    for alias, table in made:
        connections[alias].close()
        databases.execute(alias, f"DROP TABLE {table}")
        connections[alias].close()


@contextlib.contextmanager
def pgbouncer(binary: str, settings: dict[str, Any], **options: Any) -> Iterator[dict[str, str]]:
    """Pool the sessions of a database in transaction mode; give what its settings are behind it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    chosen = {
        "listen_addr": "127.0.0.1",
        "listen_port": port,
        "unix_socket_dir": "",
        "auth_type": "trust",
        "pool_mode": "transaction",
        **options,
    }
    # Not in pytest's folder, which is for nobody but the user of the tests.
    with tempfile.TemporaryDirectory(prefix="pgbouncer-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        users, config = directory / "users.txt", directory / "pgbouncer.ini"
        users.write_text(f'"{settings["USER"]}" "{settings["PASSWORD"]}"\n')
        lines = [
            "[databases]",
            f"{settings['NAME']} = host={settings['HOST']} port={settings['PORT']}",
            "[pgbouncer]",
            f"auth_file = {users}",
            *(f"{key} = {value}" for key, value in chosen.items()),
        ]
        config.write_text("\n".join(lines) + "\n")
        root: dict[str, Any] = {"user": "nobody", "extra_groups": []} if os.geteuid() == 0 else {}
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen([binary, str(config)], stdout=log, stderr=log, **root)
        try:
            wait_for(
                lambda: process.poll() is not None or _answers(port),
                30,
                lambda: (directory / "log").read_text(),
            )
            assert process.poll() is None, (directory / "log").read_text()
            yield {"HOST": "127.0.0.1", "PORT": str(port)}
        finally:
            process.terminate()
            process.wait(30)


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture(scope="session")
def _pgbouncer() -> str:
    found = program("pgbouncer", package="pgbouncer")
    need(found, "PgBouncer")
    return str(found)


@pytest.fixture
def open_pooler(_pgbouncer: str) -> Iterator[Callable[..., dict[str, str]]]:
    """A function that starts a PgBouncer before an alias, and gives the settings that lead to it."""
    from django.db import connections

    with ExitStack() as stack:

        def open_(alias: str, **options: Any) -> dict[str, str]:
            settings = connections.databases[alias]
            return stack.enter_context(pgbouncer(_pgbouncer, settings, **options))

        yield open_


@pytest.fixture(params=databases.VENDORS)
def store(request: pytest.FixtureRequest, open_store: Callable[..., DjangoStore]) -> DjangoStore:
    """A store in every kind of database in turn, empty."""
    return open_store(request.param)


@pytest.fixture
def alias(store: DjangoStore) -> str:
    """The alias of ``store``."""
    return store.alias
