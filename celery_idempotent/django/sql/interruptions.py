"""Connections after an exception out of a signal handler, which may strike between any two instructions.

``SoftTimeLimitExceeded`` may interrupt a driver that has sent a query and not read its answer. The next query would
read that answer as its own, so such a connection is dropped.
"""

from __future__ import annotations

import sqlite3
from contextlib import suppress
from typing import TYPE_CHECKING

from celery.exceptions import SoftTimeLimitExceeded

from celery_idempotent.django.sql.connections import is_idle

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def struck(error: BaseException | None) -> bool:
    """May this have been raised by a signal handler, in the middle of an exchange with the database?"""
    while error is not None:
        if isinstance(error, SoftTimeLimitExceeded) or not isinstance(error, Exception):
            return True
        error = error.__cause__ or error.__context__
    return False


def sound(own: BaseDatabaseWrapper, error: BaseException) -> bool:
    """Can the connection be used again after this?"""
    if own.in_atomic_block or struck(error):
        return False
    return own.connection is None or is_idle(own)


def drop(own: BaseDatabaseWrapper) -> None:
    """Close the connection, in whatever state it is: the database rolls back what is not committed."""
    own.atomic_blocks, own.savepoint_ids, own.run_on_commit = [], [], []
    own.in_atomic_block = own.needs_rollback = own.closed_in_transaction = False
    if own.connection is not None and own.vendor == "sqlite":
        # Django never closes a database in memory. The task may have closed it by the driver's own method.
        with suppress(sqlite3.ProgrammingError):
            own.connection.rollback()
    with suppress(Exception):
        own.close()
    if own.vendor != "sqlite" or not own.is_in_memory_db():  # type: ignore[attr-defined]
        own.connection = None
