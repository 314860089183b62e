"""Whether the transaction of an atomic run is still open when it is to be settled; if not, what the task did to it.

The record is settled by the last statement of the very transaction that has the task's writes. A task that ends this
transaction by itself breaks that, and Django does not notice::

    BEGIN ─ SAVEPOINT ─ the task's writes ─ the task's COMMIT ─ more writes, in no transaction ─ settle ─ COMMIT
                                            └▶ the effect is there, and no record: the next delivery makes it again

So a savepoint is set when the transaction begins, and released right before the record is settled. A savepoint lives as
long as its transaction: if the server knows it no more, that transaction is over. On PostgreSQL both statements go in
one round trip, and the second is not run if the first fails.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import Error, OperationalError

from celery_idempotent.django.sql.dialects import error_code, kind
from celery_idempotent.errors import StoreMisconfigured

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from celery_idempotent.django.sql.connections import Session

#: The SQLSTATE of a statement in a transaction that an earlier one has broken.
_ABORTED = "25P02"
#: Those of releasing a savepoint that is not there: in another transaction, and in none.
_NO_SAVEPOINT = ("3B001", "25P01")

_CLOSED = (
    "the task closed the connection of its own transaction (close_old_connections(), connections.close_all(), or"
    " connection.close()), which rolled it back: leave that to what comes after an idempotency_atomic task"
)
_BROKEN = (
    "the task went on after a database error inside its transaction: put the statement that may fail in a"
    " transaction.atomic() of its own, and catch the error around it"
)
_DOOMED = (
    "the task marked its transaction for rollback, by transaction.set_rollback(True) or by an exception that it caught"
    " around an atomic(savepoint=False). Nothing of it can be committed: raise an exception to roll back"
)
_ENDED = (
    "the transaction that should have settled the task's record is over before its time. The task committed or rolled"
    " it back, perhaps by a statement that commits by itself, or went on after a deadlock, which rolls back"
    " everything. An idempotency_atomic task leaves COMMIT and ROLLBACK alone"
)


class SessionLost(OperationalError):
    """The session of the task's transaction was lost before the COMMIT: everything is rolled back."""

    def __init__(self) -> None:
        super().__init__(
            "the session of the task's transaction was lost before the COMMIT: everything is rolled back"
        )


class TransactionEnded(StoreMisconfigured):
    """The task ended the transaction that should have settled its record with its own writes."""


def is_open(own: BaseDatabaseWrapper) -> bool:
    """Is the transaction open and sound, as far as Django knows?"""
    closed = own.closed_in_transaction or own.connection is None
    return not (closed or own.needs_rollback)


def check_open(session: Session, savepoint: str) -> None:
    """Raise unless the session is in the transaction that began with this savepoint, and can still commit.

    Raises:
        TransactionEnded: for what the task did.
        OperationalError: if the session is lost.
    """
    own = session.connection
    if own.closed_in_transaction or own.connection is None:
        raise TransactionEnded(_CLOSED)
    # With needs_rollback set, Django refuses every statement, also this one, which shows whether the session is alive.
    doomed, own.needs_rollback = own.needs_rollback, False
    failure: Error | None = None
    try:
        # This savepoint was set first thing in the transaction, so it exists only as long as the transaction does.
        session.execute(f"RELEASE SAVEPOINT {savepoint}")
    except Error as error:
        failure = error
    finally:
        own.needs_rollback = doomed
    if failure is not None:
        _raise_if_broken(failure, own.vendor)
    if doomed:
        cause = getattr(own, "rollback_exc", None)
        raise TransactionEnded(_DOOMED if cause is None else _BROKEN) from cause
    if failure is not None:
        raise TransactionEnded(_ENDED) from failure


def raise_if_over(failure: Error) -> None:
    """Raise what :func:`check_open` would, if PostgreSQL did not come further than the release of the savepoint."""
    _raise_if_broken(failure, "postgresql")
    if error_code(failure) in _NO_SAVEPOINT:
        raise TransactionEnded(_ENDED) from failure


def _raise_if_broken(failure: Error, vendor: str) -> None:
    if kind(failure, vendor) == "lost":
        if isinstance(failure, OperationalError):
            raise failure
        raise SessionLost from failure
    if error_code(failure) == _ABORTED:
        raise TransactionEnded(_BROKEN) from failure
