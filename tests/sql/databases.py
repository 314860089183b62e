"""Databases of the tests' own: made, given the tables, and dropped."""

from __future__ import annotations

import contextlib
import importlib
import itertools
import os
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from celery_idempotent.django.sql.dialects import Dialect
from celery_idempotent.django.store import DjangoStore
from celery_idempotent.stores.base import Store
from tests.support.servers import need
from tests.support.waiting import wait_for

VENDORS = ("postgresql", "mariadb", "sqlite")
#: A server, and SQLite, where a verb becomes part of the caller's transaction: for what is no matter of statements.
KINDS = ("postgresql", "sqlite", pytest.param("mariadb", marks=pytest.mark.wide))
TABLES = ("record", "mark", "counter", "outbox")
_POSTGRESQL = os.environ.get(
    "CELERY_IDEMPOTENT_POSTGRESQL_URL", "postgresql://postgres@127.0.0.1:5432"
)
_MARIADB = os.environ.get("CELERY_IDEMPOTENT_MARIADB_URL", "mysql://root@127.0.0.1:3306")
_NOBODY = "redis://127.0.0.1:1/0"


@contextlib.contextmanager
def ready(directory: Path) -> Iterator[None]:
    """Set up Django with the test project's settings, as tests/django does: there is one a process."""
    state: Any = importlib.import_module("celery._state")
    current = state._tls.current_app
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DJANGO_SETTINGS_MODULE", "testproject.settings")
        patch.setenv("DATABASE_PATH", str(directory / "default.sqlite3"))
        patch.setenv("REDIS_URL", _NOBODY)
        import django
        import pymysql

        pymysql.install_as_MySQLdb()
        django.setup()
    state._tls.current_app = current
    yield


def available(vendor: str) -> bool:
    """Is there a server of this kind?"""
    if vendor == "sqlite":
        return True
    from django.db import Error

    name = add_alias(f"find_{vendor}", _settings(vendor, _maintenance(vendor)))
    try:
        execute(name, "SELECT 1")
    except Error:
        return False
    finally:
        drop_alias(name)
    return True


@contextlib.contextmanager
def database(vendor: str, directory: Path) -> Iterator[dict[str, Any]]:
    """Give the settings of a new database, without tables; drop it in the end."""
    name = f"test_idempotent_{uuid.uuid4().hex[:12]}"
    if vendor == "sqlite":
        yield _settings(vendor, str(directory / f"{name}.sqlite3"))
        return
    charset = " CHARACTER SET utf8mb4" if vendor == "mariadb" else ""
    alias = add_alias(f"make_{name}", _settings(vendor, _maintenance(vendor)))
    try:
        execute(alias, f"CREATE DATABASE {name}{charset}")
        if vendor == "postgresql":
            # No test crashes the server.
            execute(alias, f"ALTER DATABASE {name} SET synchronous_commit = off")
        try:
            yield _settings(vendor, name)
        finally:
            force = " WITH (FORCE)" if vendor == "postgresql" else ""
            execute(alias, f"DROP DATABASE {name}{force}")
    finally:
        drop_alias(alias)


@contextlib.contextmanager
def fresh(vendor: str, directory: Path, alias: str) -> Iterator[dict[str, Any]]:
    """Give the settings of a new database with our tables, which Django knows by this alias meanwhile."""
    with ready(directory), contextlib.ExitStack() as stack:
        need(available(vendor), f"a {vendor} server")
        settings = stack.enter_context(database(vendor, directory))
        add_alias(alias, settings)
        migrate(alias)
        try:
            yield settings
        finally:
            drop_alias(alias)


def add_alias(alias: str, settings: dict[str, Any]) -> str:
    """Let Django know a database by this name."""
    from django.db import connections

    connections.databases[alias] = settings
    connections.configure_settings(connections.databases)
    return alias


def drop_alias(alias: str) -> None:
    """Let Django forget it, in this thread."""
    from django.db import connections

    connections[alias].close()
    del connections[alias]
    del connections.databases[alias]


def migrate(alias: str, target: Sequence[str] = ("celery_idempotent",)) -> None:
    """Make, or unmake, the tables."""
    from django.core.management import call_command

    call_command("migrate", *target, database=alias, verbosity=0)


def clear(alias: str) -> None:
    """Delete every row."""
    # In one question: this is asked before each of thousands of tests, and most tables are empty.
    looks = ", ".join(f"EXISTS (SELECT 1 FROM celery_idempotent_{table})" for table in TABLES)
    (filled,) = rows(alias, f"SELECT {looks}")
    for table in itertools.compress(TABLES, filled):
        execute(alias, f"DELETE FROM celery_idempotent_{table}")


def execute(alias: str, sql: str, params: Sequence[Any] = ()) -> int:
    """Run a statement on this thread's connection; return how many rows it touched."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params or None)
        touched: int = cursor.rowcount
        return touched


def rows(alias: str, sql: str, params: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
    """Run a query on this thread's connection."""
    from django.db import connections

    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params or None)
        return list(cursor.fetchall())


def waits(alias: str) -> bool:
    """Does a session of this database wait for a lock? MariaDB looks anew if not asked for a tenth of a second."""
    from django.db import connections

    if connections[alias].vendor == "postgresql":
        sql = (
            "SELECT 1 FROM pg_stat_activity WHERE datname = current_database()"
            " AND wait_event_type = 'Lock'"
        )
    else:
        sql = (
            "SELECT 1 FROM information_schema.innodb_trx t JOIN information_schema.processlist p"
            " ON p.id = t.trx_mysql_thread_id WHERE t.trx_state = 'LOCK WAIT' AND p.db = database()"
        )
    return bool(rows(alias, sql))


def end_sessions(alias: str, *, own_only: bool = False) -> None:
    """End the sessions of a database, or that of this thread's connection; wait until they are gone."""
    from django.db import connections

    own = connections[alias]
    me, number, end = "connection_id()", "id", "KILL %s"
    here = "information_schema.processlist WHERE db = database()"
    if own.vendor == "postgresql":
        me, number, end = "pg_backend_pid()", "pid", "SELECT pg_terminate_backend(%s)"
        here = "pg_stat_activity WHERE datname = current_database()"
    which = f"= {rows(alias, f'SELECT {me}')[0][0]}" if own_only else f"<> {me}"
    found = f"SELECT {number} FROM {here} AND {number} {which}"
    other = add_alias("executioner", {**own.settings_dict})
    for session in rows(other, found):
        execute(other, end, session)
    wait_for(lambda: rows(other, found) == [], 20, "the end of the sessions")
    drop_alias(other)


def isolation(vendor: str, level: str) -> dict[str, Any]:
    """Return Django's option for an isolation level, in SQL's words."""
    if vendor == "mariadb":
        return {"isolation_level": level}
    from psycopg import IsolationLevel

    return {"isolation_level": IsolationLevel[level.replace(" ", "_").upper()]}


#: What the vendors call a number of 64 bits in a CAST.
_BIGINT = {"postgresql": "bigint", "mysql": "SIGNED", "sqlite": "INTEGER"}


def shift(store: Store, ms: float) -> None:
    """Let time pass by the store's clock: the expression that reads it says so much more."""
    dialect = _dialect(store)
    dialect.now_us = f"({dialect.now_us} + {round(ms * 1000)})"


def stop(store: Store, us: int) -> None:
    """Stop the store's clock at a microsecond."""
    dialect = _dialect(store)
    dialect.now_us = f"CAST({us} AS {_BIGINT[dialect.vendor]})"


def _dialect(store: Store) -> Dialect:
    assert isinstance(store, DjangoStore)
    return store.connections.session_of(store.connections.own()).dialect


def _settings(vendor: str, name: str) -> dict[str, Any]:
    if vendor == "sqlite":
        return {"ENGINE": "django.db.backends.sqlite3", "NAME": name, "OPTIONS": {"timeout": 20}}
    parts = urlsplit(_POSTGRESQL if vendor == "postgresql" else _MARIADB)
    engine = "postgresql" if vendor == "postgresql" else "mysql"
    # PyMySQL reads the machine's certificates for each connection, in case it is encrypted.
    options = {} if vendor == "postgresql" else {"ssl_disabled": True}
    return {
        "ENGINE": f"django.db.backends.{engine}",
        "NAME": name,
        "USER": parts.username or "",
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname or "",
        "PORT": str(parts.port or ""),
        "OPTIONS": options,
    }


def _maintenance(vendor: str) -> str:
    return "postgres" if vendor == "postgresql" else "mysql"
