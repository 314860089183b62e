"""Writes that would not be undone with the transaction of an atomic run, and are refused therefore.

Django's connections belong to threads. ``asyncio.run()``, ``asyncio.to_thread()`` and ``sync_to_async()`` run the ORM
in a thread other than the body's, whose connection commits each statement at once. Such a thread works in a copy of the
body's context, so the statement is known by the claim that it finds there. A plain thread has a context of its own:
what it writes is not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.backends.signals import connection_created

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.protocol.claim import running

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

__all__ = ["Surroundings", "watch"]

#: Statements that leave nothing behind; comments and brackets may come first.
_READ_ONLY = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:(?:SELECT|SHOW|EXPLAIN|DESC|DESCRIBE|VALUES|TABLE|PRAGMA|SET|SAVEPOINT|RELEASE|ROLLBACK)\b"
    r"|WITH\b(?!.*\b(?:INSERT|UPDATE|DELETE|MERGE)\b))",
    re.IGNORECASE | re.DOTALL,
)
#: What the store's own verbs write, each a transaction of its own wherever it is called.
_STORE_TABLES = re.compile(r"\bcelery_idempotent_(?:record|lease|refusals|highwatermark|counter)\b")


class Surroundings:
    """What lies around the connection of a run's transaction."""

    def __init__(self, own: BaseDatabaseWrapper) -> None:
        self._own = own
        self._stepping = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """Refuse statements that write in the transaction; through another connection they may."""
        self._stepping += 1
        try:
            with self._own.execute_wrapper(_refuse_in_step):
                yield
        finally:
            self._stepping -= 1

    def has(self, connection: BaseDatabaseWrapper) -> bool:
        """Is this the connection of another thread, to the same database?"""
        own = self._own
        # The store has connections that are no thread's.
        return (
            connection is not own
            and connection.alias == own.alias
            and connections[own.alias] is connection
        )

    def guards(self, connection: BaseDatabaseWrapper) -> bool:
        """Would what is written there be taken for a part of the transaction?"""
        return not self._stepping and self.has(connection)


def watch() -> None:
    """Guard each connection that is opened from now on."""
    connection_created.connect(_guard, dispatch_uid="celery_idempotent")


def _guard(connection: BaseDatabaseWrapper, **_: object) -> None:
    wrappers: list[Any] = connection.execute_wrappers
    if _refuse_elsewhere not in wrappers:
        # First: who wrapped it for a while takes the last one away.
        wrappers.insert(0, _refuse_elsewhere)


def _refuse_elsewhere(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Mapping[str, Any]
) -> Any:
    claim = running.get()
    around = None if claim is None else getattr(claim.transaction, "surroundings", None)
    if around is not None and around.guards(context["connection"]):
        text = _statement_text(sql)
        if not _READ_ONLY.match(text) and not _STORE_TABLES.search(text):
            raise IdempotencyError(
                "a statement would write outside of the transaction of its idempotency_atomic task, and stay if that is"
                " rolled back: Django's connections belong to threads, and this is not the thread of the task's body"
                " (asyncio.run(), asyncio.to_thread(), sync_to_async()). Write from the body, or call the coroutine by"
                " async_to_sync(), whose ORM works in the body's thread"
            )
    return execute(sql, params, many, context)


def _refuse_in_step(
    execute: Callable[..., Any], sql: Any, params: Any, many: bool, context: Mapping[str, Any]
) -> Any:
    """Refuse what writes: a step is not run again, and what it wrote would be rolled back by a later failure."""
    if not _READ_ONLY.match(_statement_text(sql)):
        raise IdempotencyError(
            "a step of an idempotency_atomic task may not write to the database of its transaction: a failure after it"
            " would roll the write back and keep the step. Write outside of the step, with what it returned"
        )
    return execute(sql, params, many, context)


def _statement_text(sql: Any) -> str:
    return sql if isinstance(sql, str) else str(sql.as_string(None))  # psycopg composes statements
