"""What differs between databases: how to read the clock, how long to wait for locks, which errors are worth a retry."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from django.db import (
    DataError,
    IntegrityError,
    InterfaceError,
    NotSupportedError,
    OperationalError,
    ProgrammingError,
)

from celery_idempotent.errors import StoreMisconfigured

#: How long a verb's statement waits for a row that another transaction has locked. Only verbs lock these rows, for
#: milliseconds, unless their process is frozen at the wrong moment.
LOCK_TIMEOUT_MS = 5_000

#: What went wrong: a collision with another transaction; the connection is gone; tables or rights are missing; the row
#: exists already; another transaction locks it for too long; the database cannot serve at the moment.
Kind = Literal["conflict", "lost", "misconfigured", "duplicate", "busy", "unavailable"]

#: Idle in a transaction (25P03) or in it (25P04) for too long: the server ends the session, as with 57P.
_PG_LOST = ("08", "57P", "25P03", "25P04")
_PG_CONFLICT = ("40001", "40P01")
_MYSQL_CONFLICT = (1020, 1213)
_MYSQL_LOST = (0, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031)
_PG_BUSY = "55P03"
_MYSQL_BUSY = 1205


@dataclass(slots=True)
class Dialect:
    """The SQL of one vendor. ``now_us`` is an expression for the time in microseconds, by the server's clock."""

    vendor: str
    now_us: str
    #: Begins a verb's transaction in one round trip, and bounds its waits for locks where that is possible.
    begin: str
    #: Follows an INSERT whose row may exist already. MySQL has no such clause: there it fails, as "duplicate".
    or_nothing: str
    #: Raises the high-water mark of tokens, unless it is higher already.
    raise_mark: str
    #: Follows an INSERT of a counter: adds to the one that exists.
    or_add: str = (
        " ON CONFLICT (hour, task, outcome)"
        " DO UPDATE SET count = celery_idempotent_counter.count + excluded.count"
    )
    #: Follows the INSERT of the time of a sweep: replaces that of the last one.
    or_later: str = " ON CONFLICT (id) DO UPDATE SET ended_ms = excluded.ended_ms"
    least: str = "least"
    key: str = '"key"'
    #: The operator that divides whole numbers.
    div: str = "/"
    #: Prefix of a statement that bounds its waits for locks (MariaDB).
    lock_wait: str = ""
    #: What bounds the waits of a single UPDATE or DELETE outside of a transaction: its prefix and its suffix.
    alone: tuple[str, str] = ("", "")
    #: The same for one that may be lost if the server crashes: its commit waits for no disk, where that is possible.
    alone_at_ease: tuple[str, str] = ("", "")

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
        # The setting ends with the statement's own transaction, and the EXISTS sees to it that it is made before the
        # statement waits for the row.
        alone=(
            f"WITH lock_wait AS MATERIALIZED (SELECT set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true)) ",
            " AND EXISTS (SELECT 1 FROM lock_wait)",
        ),
        alone_at_ease=(
            (
                f"WITH lock_wait AS MATERIALIZED (SELECT set_config('lock_timeout', '{LOCK_TIMEOUT_MS}', true),"
                " set_config('synchronous_commit', 'off', true)) "
            ),
            " AND EXISTS (SELECT 1 FROM lock_wait)",
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
    """Return the SQL of a vendor, by Django's name for it.

    Raises:
        StoreMisconfigured: for any other database.
    """
    known = DIALECTS.get(vendor)
    if known is None:
        raise StoreMisconfigured(
            f"DjangoStore works on PostgreSQL, MariaDB, MySQL and SQLite, not on {vendor}"
        )
    if not mariadb:
        return replace(known)
    # MySQL can only set this for the session, and it would stay set for the project's own statements.
    lock_wait = f"SET STATEMENT innodb_lock_wait_timeout = {LOCK_TIMEOUT_MS // 1000} FOR "
    return replace(known, lock_wait=lock_wait)


def kind(error: Exception, vendor: str) -> Kind:
    """Return what a database error means for the verb."""
    code = error_code(error)
    if isinstance(error, IntegrityError):
        # The store's tables have no constraints but unique ones.
        return "duplicate"
    if vendor == "postgresql":
        return _postgresql(error, code if isinstance(code, str) else "")
    if vendor == "mysql":
        return _mysql(error, code if isinstance(code, int) else -1)
    text = str(error)
    if "locked" in text or "busy" in text:
        return "conflict"
    return _other(error, "no such" in text or "readonly" in text)


def error_code(error: Exception) -> object:
    """Return the SQLSTATE, or MySQL's number."""
    if error.args and isinstance(error.args[0], int):
        # Newer releases of PyMySQL have a SQLSTATE as well, which tells fewer errors apart.
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
