"""Statements that PostgreSQL plans once and keeps, for planning one takes it longer than doing what it says.

::

    verb 4      PREPARE celery_idempotent_6c… ─ EXECUTE
    verb 5…     EXECUTE
    verb 1,004  DEALLOCATE, PREPARE ─ EXECUTE              the tables have grown, and the plan may be another

Behind a pooler that gives a session to many, the next one may not know the statement. Then the server says so, and the
verb runs as it would without all this; within a task's transaction, from a savepoint on. A statement's name is the
digest of its text: under it there is never another statement. Where the project says that there is such a pooler
(``DISABLE_SERVER_SIDE_CURSORS``), none is prepared.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakKeyDictionary

from django.db import Error

from celery_idempotent.django.sql.columns import ColumnValues, ReadRows
from celery_idempotent.django.sql.dialects import error_code

if TYPE_CHECKING:
    from celery_idempotent.django.sql.connections import Session

#: After so many verbs a connection prepares statements. One that closes after a task or a request (Django's
#: ``CONN_MAX_AGE``) is not worth it.
_WARM = 3
#: How often a plan is used until it is made anew. A table that was almost empty then may have a million rows by now.
_USES = 1_000
#: So often a connection may have lost a statement that was prepared on it; after that none is prepared there.
_MISSES = 3

_UNKNOWN, _KNOWN, _CHANGED = "26000", "42P05", "0A000"

#: What our parameters are, by their Python type; only values may be missing.
_TYPES = {bytes: "bytea", bool: "boolean", int: "bigint", str: "text", type(None): "bytea"}


@dataclass(slots=True)
class _Plans:
    """The statements that were prepared on one connection: by name, how often each was used since."""

    verbs: int = 0
    misses: int = 0
    uses: dict[str, int] = field(default_factory=dict)


class _Statement(NamedTuple):
    name: str
    prepare: str
    execute: str


_of_connection: WeakKeyDictionary[object, _Plans] = WeakKeyDictionary()


def rows(session: Session, sql: str, params: ColumnValues) -> ReadRows:
    """Run a query that is a transaction of its own; by its plan, once its connection has done a few verbs."""
    planned = None if session.begun else plan(session, sql, types_of(params))
    if planned is not None:
        try:
            return session.rows(planned, params)
        except Error as error:
            if not is_missing(session, error):
                raise
    return session.rows(sql, params)


def types_of(params: ColumnValues) -> tuple[str, ...]:
    """Return PostgreSQL's types of these parameters, ``""`` for one that it has to guess."""
    return tuple(_TYPES.get(type(value), "") for value in params)


def plan(session: Session, sql: str, types: tuple[str, ...]) -> str | None:
    """Return what runs a query by its plan, which is made if need be; ``None``: send the query as it is.

    Outside of a transaction: one in which the server refuses a ``PREPARE`` would be lost.
    """
    raw: object = session.connection.connection
    pooled = session.connection.settings_dict.get("DISABLE_SERVER_SIDE_CURSORS")
    if session.words.vendor != "postgresql" or pooled or raw is None:
        return None
    plans = _plans_of(raw)
    plans.verbs += 1
    # Not either for a str or int of a class of its own.
    if plans.verbs <= _WARM or plans.misses >= _MISSES or "" in types:
        return None
    statement = _statement(sql, types)
    _prepare(session, plans, statement)
    return statement.execute


def is_missing(session: Session, error: Error) -> bool:
    """Is this the server's word that it does not have a statement as it was prepared? Then it is prepared anew."""
    if error_code(error) not in (_UNKNOWN, _CHANGED):
        return False
    plans = _plans_of(session.connection.connection)
    plans.misses += 1
    plans.uses.clear()
    return True


def _plans_of(raw: object) -> _Plans:
    return _of_connection.setdefault(raw, _Plans())


def _prepare(session: Session, plans: _Plans, statement: _Statement) -> None:
    used = plans.uses.get(statement.name)
    if used is None or used >= _USES:
        if used is not None:
            _control(session, f"DEALLOCATE {statement.name}", done_already=_UNKNOWN)
        _control(session, statement.prepare, done_already=_KNOWN)
        used = 0
    plans.uses[statement.name] = used + 1


def _control(session: Session, sql: str, *, done_already: str) -> None:
    try:
        session.control(sql)
    except Error as error:
        if error_code(error) != done_already:
            raise


@cache
def _statement(sql: str, types: tuple[str, ...]) -> _Statement:
    parts = sql.split("%s")
    numbered = "".join(f"{part}${n}" for n, part in enumerate(parts[:-1], start=1)) + parts[-1]
    digest = hashlib.sha1(f"{numbered} {types}".encode(), usedforsecurity=False).hexdigest()
    name = f"celery_idempotent_{digest}"
    return _Statement(
        name,
        f"PREPARE {name} ({', '.join(types)}) AS {numbered}",
        f"EXECUTE {name} ({', '.join(['%s'] * len(types))})",
    )
