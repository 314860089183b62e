"""A run inside a transaction of its store: what it writes and its end state are committed together, or not at all.

::

    claim (committed) ─▶ BEGIN ─▶ body() ─▶ settle, if the token is still ours ─▶ COMMIT ─▶ ack
                           │        │          └─ no ─▶ ROLLBACK, go on as a duplicate
                           │        └─ raises ─▶ ROLLBACK, release or settle FAILED (see Endings), raise
                           └─ a crash anywhere before COMMIT: the database rolls back, the lease runs out

Once the settle is written, an exception does not tell whether the COMMIT was done. The database knows, and is asked.

An error of the settle or the COMMIT comes too late for the body, which might have asked for a retry. The run left
nothing behind. After a deadlock, a serialization failure or a lost session it begins again, up to ``MAX_REPEATS``
times. After any other error, or more of these, ``autoretry_for`` decides, as for an error of the body. If the settle
could not reach the record, the message is published again. ``TransactionEnded`` (the task ended the transaction itself,
and may have committed) is raised as it is.
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from enum import Enum

from celery_idempotent.errors import LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol import unfinished
from celery_idempotent.protocol.calls import (
    STORE_ERRORS,
    Body,
    Call,
    CallResult,
    Codec,
    Ran,
    StoreFailed,
)
from celery_idempotent.protocol.claim import Claim, Phase
from celery_idempotent.protocol.endings import Commit, End, Endings
from celery_idempotent.records import SettleRequest, State
from celery_idempotent.stores.base import Store, Transaction

logger = logging.getLogger(__name__)

#: So often a run begins again at once when its transaction failed at the very end.
MAX_REPEATS = 4


def transactional(store: Store, task: str) -> Store:
    """Return the store, if runs can be part of its transactions.

    Raises:
        StoreMisconfigured: if not.
    """
    if store.supports_transactions:
        return store
    raise StoreMisconfigured(
        f"Task {task} is atomic (idempotency_atomic), and {type(store).__name__} has no transactions that it could "
        "be part of: set idempotency_store to the database that the task writes to, django:// or hybrid+redis://…"
    )


class _NotToCommitError(Exception):
    """The body returned after it had asked for a retry."""


class Stage(Enum):
    """How far a run in a transaction has come; it says what an exception means.

    ::

        BEGINNING ─▶ BODY ─▶ SETTLING ─▶ COMMITTING ─▶ the value is returned
            │                   │
            └───▶ REFUSED ◀─────┘ the claim is over
    """

    BEGINNING = "nothing was done"
    BODY = "the body is at work: it is rolled back"
    SETTLING = "the body returned, and its end state is not written yet: it is rolled back"
    REFUSED = "the claim is over: there is a newer one, or the record was settled or forgotten"
    COMMITTING = "the settle is written: the database decides, and is asked"


class AtomicRun:
    """Calls a body in a transaction, and settles as the last statement of it."""

    def __init__(
        self,
        call: Call,
        claim: Claim,
        body: Body,
        *,
        codec: Codec,
        endings: Endings,
        repeats: int,
    ) -> None:
        self._call = call
        self._claim = claim
        self._body = body
        self._codec = codec
        self._endings = endings
        #: So often the run began again already.
        self._repeats = repeats
        self._stage = Stage.BEGINNING
        #: What the body returned, or the exception that it raised because another task carries on.
        self._value: object = None
        self._left: Exception | None = None
        self._transaction: Transaction | None = None
        #: The store failed before the body, or at the settle: nothing is committed.
        self._trouble: StoreUnavailable | StoreMisconfigured | None = None

    def __call__(self) -> object:
        """Return what the body returned, once that is committed.

        Raises:
            BaseException: whatever the body raised, or the database at the commit.
        """
        claim = self._claim
        try:
            store = transactional(claim.store, self._endings.name)
            with store.transaction(claim.record) as transaction:
                self._stage = Stage.BODY
                claim.transaction = self._transaction = transaction
                try:
                    self._value = self._body()
                except Exception as error:
                    if not claim.replaced:
                        raise
                    self._left = error  # another task carries on: what this one wrote stays
                if unfinished.is_unfinished(self._value):
                    raise unfinished.close(self._endings.name, self._value)
                if claim.after_rollback is not None:
                    raise _NotToCommitError
                self._settle(transaction)
        except _NotToCommitError:
            self._follow_up()
            return self._value
        except STORE_ERRORS as error:
            if self._stage is Stage.BEGINNING:
                self._trouble = error
            raise
        except LeaseLost:
            if self._stage is Stage.BEGINNING:
                self._stage = Stage.REFUSED
            raise
        finally:
            claim.transaction = None
        self._endings.report_settled(self._call, claim)
        if self._left is not None:
            raise self._left
        return self._value

    def _settle(self, transaction: Transaction) -> None:
        claim, self._stage = self._claim, Stage.SETTLING
        claim.settling_since = time.monotonic()
        try:
            done = transaction.settle(
                SettleRequest(
                    record=claim.record,
                    state=State.COMPLETED,
                    value=None if claim.replaced else self._codec.dump_value(self._value),
                    keep_ms=self._endings.policy.settled_keep_ms,
                    replaced=claim.replaced,
                )
            )
        except StoreUnavailable as error:
            # TransactionEnded is not caught here, which is no StoreUnavailable: the task ended the transaction itself,
            # what it wrote may be committed, and another run would repeat it.
            self._trouble = error
            raise
        if not done:
            self._stage = Stage.REFUSED
            raise LeaseLost("a newer claim has the key: the transaction is rolled back")
        self._stage = Stage.COMMITTING

    def undone(self, error: BaseException) -> CallResult | End:
        """Act on the exception that the transaction ended with; an :class:`End` if the call is to claim again.

        Without its settle it is rolled back. With it, an answer of the commit may be lost, or a time limit may have
        struck right after it::

            settle ─▶ COMMIT ─✂─ the connection is gone ─▶ wait for the row ─▶ settled: it was committed
                                                              └─ it is not ─▶ it was rolled back: again, or raise
        """
        call, claim, endings = self._call, self._claim, self._endings
        at_exit = not isinstance(error, Exception)
        with suppress(*STORE_ERRORS):
            claim.store.abandon(claim.record)
        if self._stage is Stage.COMMITTING:
            return self._decided(error, at_exit=at_exit)
        if not at_exit:
            if self._stage is Stage.REFUSED:
                return End.NEWER_CLAIM if endings.check_newer_claim(call, claim) else End.GONE
            if claim.after_rollback is not None:
                self._follow_up()
                raise error
            if self._trouble is not None:
                # The message is published once more. The record becomes QUEUED, if it can: a sweep sends the call
                # should that message be lost.
                endings.release(claim, requeue_ms=claim.renewal.lease_ms, error=self._trouble)
                endings.report_store_failed(call, claim, self._trouble)
                return StoreFailed(self._trouble, begun=True)
        return self._rolled_back(error)

    def _follow_up(self) -> None:
        """Do what waits for the rollback: free the key, publish the retry."""
        claim = self._claim
        act, claim.after_rollback = claim.after_rollback, None
        if act is not None:
            act()

    def _decided(self, error: BaseException, *, at_exit: bool) -> CallResult | End:
        """Act on what the database made of the commit."""
        call, claim, endings = self._call, self._claim, self._endings
        commit = Commit.COMMITTED
        if claim.phase is not Phase.SETTLED:
            commit = endings.find_commit_outcome(call, claim, at_exit=at_exit)
        match commit:
            case Commit.ROLLED_BACK:
                if not at_exit and endings.check_newer_claim(call, claim):
                    return End.NEWER_CLAIM
                return self._rolled_back(error)
            case _ if at_exit:
                raise error
            case Commit.IN_DOUBT:
                return StoreFailed(
                    StoreUnavailable(
                        f"it is unknown whether the transaction of {call.identity} was committed"
                    ),
                    begun=True,
                )
            case Commit.COMMITTED:
                if self._left is not None:
                    raise self._left
                return Ran(self._value)

    def _rolled_back(self, error: BaseException) -> End:
        """End a run that left nothing behind: raise, or return why the call is to claim again."""
        call, claim, endings = self._call, self._claim, self._endings
        claim.replaced = False  # its replacement is rolled back as well
        at_end = self._stage in (Stage.SETTLING, Stage.COMMITTING)
        if at_end and isinstance(error, Exception):
            assert self._transaction is not None
            if self._transaction.passes(error) and self._repeats < MAX_REPEATS:
                logger.info(
                    "idempotency: task %s of %s was rolled back at its end (%s), and runs again at once",
                    call.task_id,
                    call.identity,
                    type(error).__name__,
                )
                endings.release(claim, requeue_ms=claim.renewal.lease_ms, error=error)
                return End.ROLLED_BACK
            error = call.late_error(error)
        end = endings.end_failed(call, claim, error)
        if end is not End.NEWER_CLAIM:
            raise error
        return end


def in_transaction(store: Store, call: Call, task: str, body: Body) -> object:
    """Call a body that expects a transaction, where nothing is settled in it."""
    returned = False
    try:
        with transactional(store, task).transaction(None):
            value = body()
            returned = True
    except Exception as error:
        if not returned:
            raise
        raise call.late_error(error) from None
    return value
