"""Whether the transaction of an atomic run is still open when it is to be settled; if not, what the task did to it.

The record is settled by the last statement of the very transaction that has the task's writes. A task that ends this
transaction by itself breaks that, and Django does not notice::

    BEGIN ─ SAVEPOINT ─ the task's writes ─ the task's COMMIT ─ more writes, in no transaction ─ settle ─ COMMIT
                                            └▶ the effect is there, and no record: the next delivery makes it again

So a savepoint is set when the transaction begins, and released right before the record is settled. A savepoint lives as
long as its transaction: if the server knows it no more, that transaction is over.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.db import Error, OperationalError

from celery_idempotent.django.sql.dialects import error_code, kind
from celery_idempotent.errors import StoreMisconfigured

if TYPE_CHECKING:
    from celery_idempotent.django.sql.connections import Session

#: The SQLSTATE of a statement in a transaction that an earlier one has broken.
_ABORTED = "25P02"

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
        super().__init__(type(self).__doc__)


class TransactionEnded(StoreMisconfigured):
    """The task ended the transaction that should have settled its record with its own writes."""


def still_there(session: Session, savepoint: str) -> None:
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
    if failure is not None and kind(failure, own.vendor) == "lost":
        if isinstance(failure, OperationalError):
            raise failure
        raise SessionLost from failure
    if failure is not None and error_code(failure) == _ABORTED:
        raise TransactionEnded(_BROKEN) from failure
    if doomed:
        cause = getattr(own, "rollback_exc", None)
        raise TransactionEnded(_DOOMED if cause is None else _BROKEN) from cause
    if failure is not None:
        raise TransactionEnded(_ENDED) from failure
