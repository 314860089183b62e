"""What the databases say differently: the clock, a lock's patience, which errors another try betters."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from django.db import (
    DataError,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
)

from celery_idempotent.errors import StoreMisconfigured

__all__ = ["DIALECTS", "LOCK_TIMEOUT_MS", "Dialect", "Kind", "dialect", "error_code", "kind"]

#: How long one of our statements waits for a row that somebody else is writing. Such a transaction
#: is as short as ours, unless its process was frozen at the wrong moment.
LOCK_TIMEOUT_MS = 5_000

#: What went wrong: it collided with another transaction; the connection is gone; tables or rights
#: are missing; the row exists; somebody holds it for too long; the database cannot at the moment.
Kind = Literal["conflict", "lost", "misconfigured", "duplicate", "busy", "unavailable"]

_PG_LOST = ("08", "57P")
_PG_CONFLICT = ("40001", "40P01")
_MYSQL_CONFLICT = (1020, 1213)
_MYSQL_LOST = (0, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031)
_PG_BUSY = "55P03"
_MYSQL_BUSY = 1205


@dataclass(slots=True)
class Dialect:
    """One vendor's words. ``now_us`` is an expression for the time in microseconds, by its clock."""

    vendor: str
    now_us: str
    #: One statement that begins a transaction of ours, with bounded waits where it can say so.
    begin: str
    #: Goes after an INSERT that may find its row there; where empty, the error tells.
    or_nothing: str
    #: Sets the mark, unless it is higher.
    raise_mark: str
    #: Adds to the counter that is there.
    or_add: str = (
        " ON CONFLICT (hour, task, outcome)"
        " DO UPDATE SET count = celery_idempotent_counter.count + excluded.count"
    )
    #: Writes over the time of the last sweep.
    or_later: str = " ON CONFLICT (id) DO UPDATE SET ended_ms = excluded.ended_ms"
    least: str = "least"
    key: str = '"key"'
    #: Divides whole numbers.
    div: str = "/"
    #: Where a statement can be told how long to wait for a lock.
    patience: str = ""
    #: What tells one UPDATE or DELETE, in no transaction of ours, how long to wait: before it, and at its end.
    alone: tuple[str, str] = ("", "")

    @property
    def now_ms(self) -> str:
        """The time in milliseconds."""
        return f"({self.now_us} {self.div} 1000)"


_UPSERT_MARK = (
    "INSERT INTO celery_idempotent_highwatermark (id, token) VALUES (1, %s)"
    " ON CONFLICT (id) DO UPDATE SET token = excluded.token"
    " WHERE celery_idempotent_highwatermark.token < excluded.token"
)

DIALECTS = {
    "postgresql": Dialect(
        vendor="postgresql",
        # Not now(), which is the time when the transaction began.
        now_us="(extract(epoch from clock_timestamp()) * 1000000)::bigint",
        begin=f"BEGIN; SET LOCAL lock_timeout = {LOCK_TIMEOUT_MS}",
        or_nothing=" ON CONFLICT (digest) DO NOTHING",
        raise_mark=_UPSERT_MARK,
        # What is set is over with the statement's own transaction. The row is locked after the condition is known.
        alone=(
            f"WITH patience AS MATERIALIZED (SELECT set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)) ",
            " AND EXISTS (SELECT 1 FROM patience)",
        ),
    ),
    "mysql": Dialect(
        vendor="mysql",
        # Not UNIX_TIMESTAMP(NOW(6)), which is wrong in the hour that a time zone repeats.
        now_us="timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))",
        begin="START TRANSACTION",
        or_nothing="",
        raise_mark=(
            "INSERT INTO celery_idempotent_highwatermark (id, token) VALUES (1, %s)"
            " ON DUPLICATE KEY UPDATE token = greatest(token, VALUES(token))"
        ),
        or_add=" ON DUPLICATE KEY UPDATE count = count + VALUES(count)",
        or_later=" ON DUPLICATE KEY UPDATE ended_ms = VALUES(ended_ms)",
        key="`key`",
        div="DIV",
    ),
    "sqlite": Dialect(
        vendor="sqlite",
        now_us=(
            "(CAST(strftime('%%s', 'now') AS INTEGER) * 1000000"
            " + CAST(substr(strftime('%%f', 'now'), 4) AS INTEGER) * 1000)"
        ),
        # A transaction that began as a reader cannot wait for the write lock later.
        begin="BEGIN IMMEDIATE",
        or_nothing=" ON CONFLICT (digest) DO NOTHING",
        raise_mark=_UPSERT_MARK,
        least="min",
    ),
}


def dialect(vendor: str, *, mariadb: bool = False) -> Dialect:
    """Return the words of a vendor, as Django calls it.

    Raises:
        StoreMisconfigured: for a database that is none of these.
    """
    known = DIALECTS.get(vendor)
    if known is None:
        raise StoreMisconfigured(
            f"DjangoStore works on PostgreSQL, MariaDB, MySQL and SQLite, not on {vendor}"
        )
    if not mariadb:
        return replace(known)
    # MySQL has no such thing without a session variable, which would outlive the statement.
    patience = f"SET STATEMENT innodb_lock_wait_timeout = {LOCK_TIMEOUT_MS // 1000} FOR "
    return replace(known, patience=patience)


def kind(error: Exception, vendor: str) -> Kind:
    """Return what kind of trouble a database error is."""
    code = error_code(error)
    if isinstance(error, IntegrityError):
        # MariaDB's snapshot isolation and foreign keys of others aside, all of ours are unique.
        return "duplicate"
    if vendor == "postgresql":
        return _postgresql(error, code if isinstance(code, str) else "")
    if vendor == "mysql":
        return _mysql(error, code if isinstance(code, int) else -1)
    text = str(error)
    if "locked" in text or "busy" in text:
        return "conflict"
    return _other(error, "no such" in text or "readonly" in text)


def error_code(error: Exception) -> Any:
    """Return the SQLSTATE, or MySQL's number."""
    if error.args and isinstance(error.args[0], int):
        # Newer releases of PyMySQL know a SQLSTATE as well, which says less.
        return error.args[0]
    cause = error.__cause__ or error
    for name in ("sqlstate", "pgcode"):
        found = getattr(cause, name, None)
        if found:
            return found
    return None


def _postgresql(error: Exception, code: str) -> Kind:
    if code in _PG_CONFLICT:
        return "conflict"
    if code == _PG_BUSY:
        return "busy"
    if code.startswith(_PG_LOST) or (
        not code and isinstance(error, (OperationalError, InterfaceError))
    ):
        return "lost"
    return _other(error, code.startswith(("28", "3D", "42")))


def _mysql(error: Exception, code: int) -> Kind:
    if code in _MYSQL_CONFLICT:
        return "conflict"
    if code == _MYSQL_BUSY:
        return "busy"
    if code in _MYSQL_LOST or isinstance(error, InterfaceError):
        return "lost"
    return _other(error, code in (1044, 1045, 1049, 1142, 1146, 1153))


def _other(error: Exception, settings: bool) -> Kind:
    if settings or isinstance(error, (ProgrammingError, DataError, NotSupportedError)):
        return "misconfigured"
    return "unavailable"
