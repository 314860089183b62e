"""What differs between databases: clock, locks, clauses, what errors mean, which options bound a wait."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from django import db

from celery_idempotent.errors import StoreMisconfigured

#: A collision with another transaction; the session is gone, or useless; tables or rights are missing; the row exists
#: already; the database cannot serve at the moment.
Kind = Literal["conflict", "lost", "misconfigured", "duplicate", "unavailable"]

#: The rows of the table of marks: the largest token of the rows that were deleted, when the last sweep ended, the first
#: use as :meth:`.Store.mark_use` returns it, and the last probe.
TOKENS, SWEPT, USED, PROBED = 1, 2, 3, 4

#: The lock of a claim's run on PostgreSQL, for a row ``r``.
POSTGRESQL_LOCK = "('x' || encode(substr(r.digest, 1, 8), 'hex'))::bit(64)::bigint # r.token"


@dataclass(slots=True, kw_only=True)
class Dialect:
    """The SQL of one vendor. ``now_us`` is an expression for the server's time in microseconds."""

    vendor: str
    now_us: str
    #: Is the run of the claim in row ``r`` within its transaction, in whatever session?
    running: str
    #: Patterns of the codes of errors, on SQLite of their texts.
    conflict: str
    lost: str
    misconfigured: str
    #: Follows an INSERT whose row may exist already. MySQL has no such clause: there it fails, as "duplicate".
    or_nothing: str = " ON CONFLICT (digest) DO NOTHING"
    #: Raises a mark, unless it is higher already.
    raise_mark: str = (
        "INSERT INTO celery_idempotent_mark (id, value) VALUES (%s, %s) ON CONFLICT (id) DO UPDATE"
        " SET value = excluded.value WHERE celery_idempotent_mark.value < excluded.value"
    )
    #: Follows an INSERT of a counter: adds to the one that exists.
    or_add: str = (
        " ON CONFLICT (length_ms, start_ms, task, outcome)"
        " DO UPDATE SET count = celery_idempotent_counter.count + excluded.count"
    )
    #: Options of a connection that bound the waits for a silent server, which may last for ever.
    bounds: Mapping[str, int] = field(default_factory=dict)
    least: str = "least"
    key: str = '"key"'
    #: The operator that divides whole numbers.
    div: str = "/"

    @property
    def now_ms(self) -> str:
        """The time in milliseconds."""
        return f"({self.now_us} {self.div} 1000)"


_DIALECTS = {
    "postgresql": Dialect(
        vendor="postgresql",
        # Not now(), which is the time when the transaction began.
        now_us="(extract(epoch from clock_timestamp()) * 1000000)::bigint",
        running=f"NOT pg_try_advisory_xact_lock_shared({POSTGRESQL_LOCK})",
        conflict="40001|40P01",
        # Loss of the connection, shutdown, idle for too long; a prepared statement that a pooler or a migration took.
        lost="08|57P|25P03|25P04|26000|42P05|0A000",
        misconfigured="25006|28|3D|42",
        bounds={
            "connect_timeout": 5,
            "tcp_user_timeout": 20_000,
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        },
    ),
    "mysql": Dialect(
        vendor="mysql",
        # Not UNIX_TIMESTAMP(NOW(6)), which is wrong in the hour that a time zone repeats.
        now_us="timestampdiff(microsecond, '1970-01-01', utc_timestamp(6))",
        running="is_used_lock(concat('celery_idempotent:', hex(r.digest), r.token)) IS NOT NULL",
        conflict="1020|1213",
        # 1153: a packet was too large; 1290: a former primary is read-only; 1927: killed; 4031: idle for too long.
        lost="0$|1153|1290|1927|20(02|03|06|13|14|55)|4031",
        misconfigured="10(44|45|49)|11(42|46|53)|1792",
        or_nothing="",
        raise_mark=(
            "INSERT INTO celery_idempotent_mark (id, value) VALUES (%s, %s)"
            " ON DUPLICATE KEY UPDATE value = greatest(value, VALUES(value))"
        ),
        or_add=" ON DUPLICATE KEY UPDATE count = count + VALUES(count)",
        # Longer than MySQL's own time-out for locks.
        bounds={"connect_timeout": 5, "read_timeout": 60, "write_timeout": 60},
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
        conflict=".*(locked|busy)",
        lost="never$",
        misconfigured=".*(no such|readonly)",
        least="min",
    ),
}


def dialect_of(vendor: str) -> Dialect:
    """Return the SQL of a vendor, by Django's name for it.

    Raises:
        StoreMisconfigured: for any other database.
    """
    if vendor not in _DIALECTS:
        raise StoreMisconfigured(
            f"DjangoStore works on PostgreSQL, MariaDB, MySQL and SQLite, not on {vendor}"
        )
    return replace(_DIALECTS[vendor])


def kind(error: Exception, vendor: str) -> Kind:
    """Return what a database error means."""
    known, code = dialect_of(vendor), error_code(error)
    text = str(error if code is None else code)
    if isinstance(error, db.IntegrityError):
        # The store's tables have no constraints but unique ones.
        return "duplicate"
    if re.match(known.conflict, text):
        return "conflict"
    # A lost session has no code on PostgreSQL.
    cut = code is None and vendor == "postgresql" and isinstance(error, db.OperationalError)
    if cut or isinstance(error, db.InterfaceError) or re.match(known.lost, text):
        return "lost"
    settings = (db.ProgrammingError, db.DataError, db.NotSupportedError)
    if isinstance(error, settings) or re.match(known.misconfigured, text):
        return "misconfigured"
    return "unavailable"


def error_code(error: BaseException) -> object:
    """Return the SQLSTATE, or MySQL's number."""
    if error.args and isinstance(error.args[0], int):
        # Newer releases of PyMySQL have a SQLSTATE as well, which tells fewer errors apart.
        return error.args[0]
    cause = error.__cause__ or error
    return getattr(cause, "sqlstate", None) or getattr(cause, "pgcode", None)
