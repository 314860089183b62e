"""Refuses writes of an atomic task through a connection of another thread, which its rollback would not undo.

Each thread has a connection of its own in Django. ``asyncio.run()``, ``asyncio.to_thread()`` and ``sync_to_async()``
run the ORM in another thread than the task's body, and that thread's connection commits each statement at once::

    body's thread     BEGIN ─────────────────────────────── ROLLBACK
    other thread              INSERT payment, committed                  the payment stays, and is made twice

Such a thread works in a copy of the body's context, where :data:`running` names the claim: that is how the statement is
recognised. A plain ``threading.Thread`` has an empty context, so its writes cannot be recognised.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from django.db import connections
from django.db.backends.signals import connection_created

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.protocol.claim import current_run

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

#: Statements that change no data; comments and brackets may come first.
_READ_ONLY = re.compile(
    r"(?:\s|\(|--[^\n]*\n|/\*.*?\*/)*"
    r"(?:(?:SELECT|SHOW|EXPLAIN|DESC|DESCRIBE|VALUES|TABLE|PRAGMA|SET|SAVEPOINT|RELEASE|ROLLBACK)\b"
    r"|WITH\b(?!.*\b(?:INSERT|UPDATE|DELETE|MERGE)\b))",
    re.IGNORECASE | re.DOTALL,
)
#: The tables of the store. Its verbs commit by themselves on purpose, in any thread.
_STORE_TABLES = re.compile(r"\bcelery_idempotent_(?:record|lease|highwatermark|counter)\b")


class OtherConnections:
    """The connection of an atomic run's transaction, and which other connections must not write meanwhile."""

    def __init__(self, own: BaseDatabaseWrapper) -> None:
        self._own = own
        self._stepping = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        """For the length of a step, refuse writes in the transaction, and allow them on other connections."""
        self._stepping += 1
        try:
            with self._own.execute_wrapper(_refuse_in_step):
                yield
        finally:
            self._stepping -= 1

    def has(self, connection: object) -> bool:
        """Is this the connection of another thread, to the same database?"""
        # Not one of the store's spare connections, which belong to no thread.
        return connection is not self._own and connections[self._own.alias] is connection

    def guards(self, connection: object) -> bool:
        """Would a reader of the task expect a write there to be part of the transaction?"""
        return not self._stepping and self.has(connection)


def watch() -> None:
    """Check the statements of each connection that is opened from now on."""
    connection_created.connect(_guard, dispatch_uid="celery_idempotent")


def _guard(connection: BaseDatabaseWrapper, **_: object) -> None:
    wrappers = connection.execute_wrappers
    if _refuse_elsewhere not in wrappers:
        # First in the list: Django's execute_wrapper() removes the last one when its block ends.
        wrappers.insert(0, _refuse_elsewhere)


def _refuse_elsewhere(
    execute: Callable[..., object],
    sql: object,
    params: object,
    many: bool,
    context: Mapping[str, object],
) -> object:
    """Raise for a statement that writes to the database of an atomic run on another connection than the run's.

    Django calls this around each statement (``execute_wrapper``). The context of the run is copied to what it starts::

        body ─ asyncio.to_thread(save) ─ a thread of its own: another connection, committed though the run rolls back
    """
    claim = current_run.get()
    around = None if claim is None else claim.transaction
    if around is not None and around.guards(context["connection"]):
        text = _statement_text(sql)
        if not _READ_ONLY.match(text) and not _STORE_TABLES.search(text):
            raise IdempotencyError(
                "a statement would write outside of the transaction of its idempotency_atomic task, and stay if that is"
                " rolled back. Django's connections belong to threads, and this is not the thread of the task's body"
                " (asyncio.run(), asyncio.to_thread(), sync_to_async()). Write from the body, or call the coroutine by"
                " async_to_sync(), whose ORM works in the body's thread"
            )
    return execute(sql, params, many, context)


def _refuse_in_step(
    execute: Callable[..., object],
    sql: object,
    params: object,
    many: bool,
    context: Mapping[str, object],
) -> object:
    """Refuse writes: a failure after the step would roll them back, and the step, being recorded, is not run again."""
    if not _READ_ONLY.match(_statement_text(sql)):
        raise IdempotencyError(
            "a step of an idempotency_atomic task may not write to the database of its transaction: a failure after it"
            " would roll the write back and keep the step. Write outside of the step, with what it returned"
        )
    return execute(sql, params, many, context)


def _statement_text(sql: object) -> str:
    compose = getattr(sql, "as_string", None)  # psycopg composes statements
    return str(sql) if compose is None else str(compose(None))
