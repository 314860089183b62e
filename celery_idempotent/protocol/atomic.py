"""A run inside a transaction of its store: its writes and its end state are committed together, or not at all.

::

    claim (committed) ─▶ BEGIN ─▶ body() ─▶ settle, if the token is still ours ─▶ COMMIT ─▶ ack
                           │        │          └─ no ─▶ ROLLBACK, go on as a duplicate
                           │        └─ raises ─▶ ROLLBACK, release or settle FAILED (see run._end_failed), raise
                           └─ a crash anywhere before COMMIT: the database rolls back, the lease runs out

An error of the settle or the COMMIT comes too late for the body to ask for a retry. After a deadlock, a serialization
failure or a lost session the run begins again, up to three times. If the settle could not reach the record, the message
is published again. Any other error fails the task.
"""

from __future__ import annotations

import enum
import logging
import time

from celery_idempotent import backoff, signals
from celery_idempotent.errors import STORE_ERRORS, LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.claim import Phase
from celery_idempotent.protocol.run import (
    UNFINISHED,
    Body,
    Run,
    end_of,
    find_newer_claim,
    give_back,
    note_end,
    refuse_unfinished,
)
from celery_idempotent.records import State
from celery_idempotent.stores.base import Store, Transaction

logger = logging.getLogger(__name__)

#: How often a run that was rolled back begins again at once.
_MAX_REPEATS = 3


def transactional(store: Store, task: str) -> Store:
    """Return the store, or raise ``StoreMisconfigured`` if a run cannot be part of its transactions."""
    if store.supports_transactions:
        return store
    raise StoreMisconfigured(
        f"Task {task} is atomic (idempotency_atomic), but {type(store).__name__} has no transactions: set "
        "idempotency_store to the database that the task writes to, django:// or hybrid+redis://…"
    )


def run_body(run: Run, body: Body) -> object:
    """Call a body in a transaction whose last statement is the settle: see :attr:`.Run.in_transaction`."""
    if run.phase is Phase.UNGUARDED or run.policy.mode == "observe":
        with transactional(run.open_store(), run.name).unguarded_transaction():
            run.shield.open()
            value = body()
            run.shield.closed = True
        return value
    attempt = _Attempt(run, body)
    try:
        attempt.run()
    except BaseException as error:  # noqa: BLE001  raised again, unless the database says otherwise
        attempt.handle_failure(error)
    if attempt.replaced_by is not None:
        raise attempt.replaced_by
    return attempt.value


class _NotToCommitError(Exception):
    """The body returned after it had asked for a retry."""


class Stage(enum.Enum):
    """How far a run in a transaction has come; it says what an exception means."""

    BEGINNING = "nothing was done"
    BODY = "the body is running: it is rolled back"
    SETTLING = "the body returned, and its end state is not written yet: it is rolled back"
    COMMITTING = "the settle is written: the database decides, and is asked"


class _Attempt:
    """One call of the body, in one transaction."""

    value: object = None
    #: The exception of a body that replaced its task: its writes stay.
    replaced_by: Exception | None = None
    _transaction: Transaction | None = None

    def __init__(self, run: Run, body: Body) -> None:
        self._run, self._body, self._stage = run, body, Stage.BEGINNING

    def run(self) -> None:
        """Call the body, settle and commit."""
        run = self._run
        try:
            transaction = transactional(run.store, run.name).transaction(run.record)
            self._transaction = transaction
            with transaction:
                self._stage = Stage.BODY
                run.transaction = transaction
                try:
                    run.shield.open()
                    self.value = self._body()
                except Exception as error:
                    if not run.replaced:
                        raise
                    self.replaced_by = error
                run.shield.closed = True
                if isinstance(self.value, UNFINISHED):
                    refuse_unfinished(run, self.value)
                if run.after_rollback is not None:
                    raise _NotToCommitError
                self._stage, run.settling_since = Stage.SETTLING, time.monotonic()
                if not transaction.settle(end_of(run, State.COMPLETED, self.value)):
                    raise LeaseLost("a newer claim has the key: the transaction is rolled back")
                self._stage = Stage.COMMITTING
        finally:
            run.shield.closed = True
            run.transaction = None
        note_end(run, State.COMPLETED)

    def handle_failure(self, error: BaseException) -> None:
        """Raise the outcome of the transaction, unless it was committed or the call claims again."""
        run, stage = self._run, self._stage
        if self._transaction is not None:
            self._transaction.abandon()
        if not isinstance(error, Exception):
            run.replaced = False
            if stage is Stage.COMMITTING and run.phase is Phase.RUNNING:
                run.phase = Phase.ENDED  # the record tells whether it was committed
            raise error
        if run.phase is Phase.SETTLED or (stage is Stage.COMMITTING and self._resolve_commit()):
            return
        run.replaced, self.replaced_by = False, None  # its replacement is rolled back as well
        unreachable = STORE_ERRORS if stage is Stage.BEGINNING else StoreUnavailable
        if run.after_rollback is not None:
            act, run.after_rollback = run.after_rollback, None
            act()
            if not isinstance(error, _NotToCommitError):
                raise error
        elif stage is not Stage.BODY and isinstance(error, LeaseLost):
            if not find_newer_claim(run):
                run.phase = Phase.AGAIN  # it was forgotten or released: the key is free
        elif stage is not Stage.BODY and isinstance(error, unreachable):
            # The message is published again. If it is lost, a sweep publishes that of the QUEUED record.
            give_back(run, requeue_ms=run.policy.lease_ms, error=error)
            signals.report(run, signals.store_failed, run.record, error=error)
            run.store_failed(error, begun=True)
        else:
            self._repeat(error)

    def _resolve_commit(self) -> bool:
        """Ask the database for the outcome of a commit whose answer is lost, or that a time limit struck.

        The question waits for the lock of the transaction, which is held until its end::

            run       claim ─ BEGIN ─ body ─ settle ─ COMMIT ─✂─ no answer ─ wait for the lock … COMPLETED: committed
            database                                  COMMIT is running ──────────────────────── committed
        """
        run = self._run
        assert self._transaction is not None
        until = time.monotonic() + run.policy.lease_ms / 1000
        try:
            committed = backoff.persist(
                self._transaction.committed, until=until, errors=STORE_ERRORS
            )
        except STORE_ERRORS:
            run.phase = Phase.ENDED
            unknown = f"it is unknown whether the transaction of {run.identity} was committed"
            run.store_failed(StoreUnavailable(unknown), begun=True)
        if committed:
            note_end(run, State.COMPLETED)
        return committed

    def _repeat(self, error: Exception) -> None:
        """Have a run that was rolled back claim again if the error is transient; else raise it."""
        run = self._run
        at_end = self._stage in (Stage.SETTLING, Stage.COMMITTING)
        if (
            self._transaction is None
            or run.repeats >= _MAX_REPEATS
            or not self._transaction.is_transient(error, at_end=at_end)
        ):
            raise error
        line = "idempotency: task %s of %s was rolled back (%s), and runs again at once"
        logger.info(line, run.task_id, run.identity, type(error).__name__)
        run.repeats += 1
        give_back(run, requeue_ms=run.policy.lease_ms, error=error)
        # Runs that collided would meet again without it.
        run.shield.pause(backoff.seconds(run.repeats, first=0.02))
        run.phase = Phase.AGAIN
