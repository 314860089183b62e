"""What differs between databases: clock, locks, and errors that are worth a retry."""

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

#: A collision with another transaction; the session is gone; tables or rights are missing; the row exists already; the
#: database cannot serve at the moment.
Kind = Literal["conflict", "lost", "misconfigured", "duplicate", "unavailable"]

#: Idle in a transaction (25P03, 25P04) or in the session (57P05) for too long, shutdown, loss of the connection.
_PG_LOST = ("08", "57P", "25P03", "25P04")
_PG_CONFLICT = ("40001", "40P01")
_MYSQL_CONFLICT = (1020, 1213)
#: 1927: killed; 4031: idle for too long.
_MYSQL_LOST = (0, 1927, 2002, 2003, 2006, 2013, 2014, 2055, 4031)

#: The lock of a claim's run on PostgreSQL, for a row ``r``.
POSTGRESQL_LOCK = "('x' || encode(substr(r.digest, 1, 8), 'hex'))::bit(64)::bigint # r.token"


@dataclass(slots=True)
class Dialect:
    """The SQL of one vendor. ``now_us`` is an expression for the server's time in microseconds."""

    vendor: str
    now_us: str
    #: Is the run of the claim in row ``r`` within its transaction, in whatever session?
    running: str
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

    @property
    def now_ms(self) -> str:
        """The time in milliseconds."""
        return f"({self.now_us} {self.div} 1000)"


_OR_NOTHING = " ON CONFLICT (digest) DO NOTHING"
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
        running=f"NOT pg_try_advisory_xact_lock_shared({POSTGRESQL_LOCK})",
        or_nothing=_OR_NOTHING,
        raise_mark=_UPSERT_MARK,
    ),
    "mysql": Dialect(
        vendor="mysql",
        # Not UNIX_TIMESTAMP(NOW(6)), which is wrong in the hour that a time zone repeats.
        now_us="timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))",
        running="is_used_lock(concat('celery_idempotent:', hex(r.digest), r.token)) IS NOT NULL",
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
        # A claim that takes a key over has the write lock, so no run of the key is within its transaction.
        running="0",
        or_nothing=_OR_NOTHING,
        raise_mark=_UPSERT_MARK,
        least="min",
    ),
}


def dialect(vendor: str) -> Dialect:
    """Return the SQL of a vendor, by Django's name for it.

    Raises:
        StoreMisconfigured: for any other database.
    """
    known = DIALECTS.get(vendor)
    if known is None:
        raise StoreMisconfigured(
            f"DjangoStore works on PostgreSQL, MariaDB, MySQL and SQLite, not on {vendor}"
        )
    return replace(known)


def kind(error: Exception, vendor: str) -> Kind:
    """Return what a database error means."""
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


def error_code(error: BaseException) -> object:
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
    if code.startswith(_PG_LOST) or (
        not code and isinstance(error, (OperationalError, InterfaceError))
    ):
        return "lost"
    return _other(error, code.startswith(("28", "3D", "42")))


def _mysql(error: Exception, code: int) -> Kind:
    if code in _MYSQL_CONFLICT:
        return "conflict"
    if code in _MYSQL_LOST or isinstance(error, InterfaceError):
        return "lost"
    return _other(error, code in (1044, 1045, 1049, 1142, 1146, 1153))


def _other(error: Exception, settings: bool) -> Kind:
    if settings or isinstance(error, (ProgrammingError, DataError, NotSupportedError)):
        return "misconfigured"
    return "unavailable"
