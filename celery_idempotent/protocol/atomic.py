"""A run inside a transaction of its store: what it writes and its end are committed together, or not at all.

::

    claim (committed) ─▶ BEGIN ─▶ body() ─▶ settle, if the token is still ours ─▶ COMMIT ─▶ ack
                           │        │          └─ no ─▶ ROLLBACK, go on as a duplicate
                           │        └─ raises ─▶ ROLLBACK, release, raise
                           └─ a crash anywhere before COMMIT: the database rolls back, the lease runs out

Once the settle is written, only the database knows what a COMMIT came to that did not answer: it is asked.

What the settle or the COMMIT raised comes too late for the body, which might have asked for a retry. It left nothing
behind, so the run begins again at once, a few times; after that ``autoretry_for`` decides, as for an error of the body.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from celery_idempotent.errors import LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol import unfinished
from celery_idempotent.protocol.calls import STORE_ERRORS, Call, Codec, Ran, Result, StoreFailed
from celery_idempotent.protocol.claim import Claim
from celery_idempotent.protocol.endings import Endings
from celery_idempotent.records import State
from celery_idempotent.stores.base import Store, Transaction

__all__ = ["AtomicRun", "Repeats", "in_transaction", "transactional"]

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


class Repeats:
    """How often a run that its database rolled back at the very end may begin again at once."""

    def __init__(self) -> None:
        self._left = MAX_REPEATS
        self._due = False

    def another(self) -> bool:
        """May it, once more?"""
        self._due = self._left > 0
        self._left -= self._due
        return self._due

    def pause(self) -> None:
        """Wait a moment before another, so that those who collided do not meet again."""
        if self._due:
            self._due = False
            time.sleep(random.uniform(0, 0.01 * 2 ** (MAX_REPEATS - self._left)))


class AtomicRun:
    """Calls a body in a transaction, and settles as the last statement of it."""

    def __init__(
        self,
        call: Call,
        claim: Claim,
        body: Callable[[], Any],
        *,
        codec: Codec,
        endings: Endings,
        repeats: Repeats,
    ) -> None:
        self._call = call
        self._claim = claim
        self._body = body
        self._codec = codec
        self._endings = endings
        self._repeats = repeats
        #: What the body returned, or the exception that it left with because another task carries on.
        self.value: Any = None
        self.left: Exception | None = None
        #: The body is over: what goes wrong from here on is the database's.
        self.ending: Transaction | None = None
        #: The settle is written: from here on the database decides.
        self.written = False
        #: The key has another token: what the body wrote is rolled back.
        self.superseded = False
        #: The store failed before the body or at the settle: nothing is committed.
        self.trouble: StoreUnavailable | StoreMisconfigured | None = None

    def __call__(self) -> Any:
        """Return what the body returned, once that is committed.

        Raises:
            BaseException: whatever the body raised, or the database at the commit.
        """
        claim = self._claim
        begun = False
        try:
            with transactional(claim.store, self._endings.name).transaction(
                claim.record
            ) as transaction:
                begun = True
                claim.transaction = transaction
                try:
                    self.value = self._body()
                except Exception as error:
                    if not claim.replaced:
                        raise
                    self.left = error  # another task carries on: what this one wrote stays
                if unfinished.is_unfinished(self.value):
                    raise unfinished.close(self._endings.name, self.value)
                if claim.afterwards is not None:
                    raise _NotToCommitError
                self._settle(transaction)
        except _NotToCommitError:
            self._endings.follow(claim)
            return self.value
        except STORE_ERRORS as error:
            if not begun:
                self.trouble = error
            raise
        except LeaseLost:
            # At the very beginning: a sweep, or a newer claim, was first.
            self.superseded = self.superseded or not begun
            raise
        finally:
            claim.transaction = None
        self._endings.settled(self._call, claim)
        if self.left is not None:
            raise self.left
        return self.value

    def _settle(self, transaction: Transaction) -> None:
        claim, self.ending = self._claim, transaction
        try:
            done = transaction.settle(
                state=State.COMPLETED,
                value=None if claim.replaced else self._codec.dump_value(self.value),
                keep_ms=self._endings.policy.settled_keep_ms,
                replaced=claim.replaced,
            )
        except StoreUnavailable as error:
            # Not one that blames the task, which ended the transaction itself: to run it again would double its effect.
            self.trouble = error
            raise
        if not done:
            self.superseded = True
            raise LeaseLost("its transaction is rolled back")
        self.written = True

    def undone(self, error: BaseException) -> Result | None:
        """Act on what the transaction ended with; ``None`` if a newer claim makes it nobody's business.

        Without its settle it is rolled back. With it, an answer of the commit may be lost, or a time limit may have
        struck right after it::

            settle ─▶ COMMIT ─✂─ the connection is gone ─▶ wait for the row ─▶ settled: it was committed
                                                              └─ it is not ─▶ it was rolled back: again, or raise
        """
        call, claim, endings = self._call, self._claim, self._endings
        patient = isinstance(error, Exception)
        with suppress(*STORE_ERRORS):
            claim.store.abandon(claim.record)
        if self.superseded and patient:
            endings.superseded(call, claim)
            return None
        if self.written:
            return self._decided(error, patient=patient)
        if claim.afterwards is not None and patient:
            endings.follow(claim)
            raise error
        if self.trouble is not None and patient:
            # Its message goes out once more, and may be all that there is of it.
            endings.release(claim, requeue_ms=claim.lease.lease_ms)
            endings.failed(call, claim, self.trouble)
            return StoreFailed(self.trouble)
        self._rolled_back(error)
        return None

    def _decided(self, error: BaseException, *, patient: bool) -> Result | None:
        """Act on what the database made of the commit."""
        call, claim, endings = self._call, self._claim, self._endings
        done = True if claim.settled else endings.resolve(call, claim, patient=patient)
        if done is False:
            if patient and endings.superseded(call, claim):
                return None
            self._rolled_back(error)
            return None
        if not patient:
            raise error
        if done is None:
            return StoreFailed(
                StoreUnavailable(
                    f"nobody knows whether the transaction of {call.identity} is committed"
                )
            )
        if self.left is not None:
            raise self.left
        return Ran(self.value)

    def _rolled_back(self, error: BaseException) -> None:
        """End a run that left nothing behind; or return, and it goes on from its claim, as a duplicate would."""
        call, claim, endings, ending = self._call, self._claim, self._endings, self.ending
        claim.replaced = False  # its replacement is rolled back as well
        if ending is not None and isinstance(error, Exception):
            if ending.passes(error) and self._repeats.another():
                logger.info(
                    "idempotency: task %s of %s was rolled back at its end (%s), and runs again at once",
                    call.task_id,
                    call.identity,
                    type(error).__name__,
                )
                endings.release(claim, requeue_ms=claim.lease.lease_ms)
                return
            error = call.late_error(error)
        if endings.ended(call, claim, error):
            raise error


def in_transaction(store: Store, call: Call, task: str, body: Callable[[], Any]) -> Any:
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
