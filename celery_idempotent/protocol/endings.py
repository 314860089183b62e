"""How a claim ends: its end state is written, or its key is given back, whatever happens meanwhile."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from celery_idempotent import signals
from celery_idempotent.protocol import backoff, deferred
from celery_idempotent.protocol.calls import STORE_ERRORS, Call, Codec
from celery_idempotent.protocol.claim import Claim
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.telling import FAILED_WITHOUT_RUN, Line, Reporter
from celery_idempotent.records import State, Stored

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal

    from celery_idempotent.records import Record

__all__ = ["Endings"]

logger = logging.getLogger(__name__)

#: How long a release tries to reach the store before the key is left to its lease, in seconds.
RELEASE_PATIENCE = 1.0

#: So many failures to serialize a result (a time limit may be one) are worth another try.
MAX_FAULTS = 2


class Endings:
    """Ends the claims of one task under its policy."""

    def __init__(self, policy: Policy, codec: Codec, reporter: Reporter) -> None:
        self.name = reporter.task
        self.policy = policy
        self._codec = codec
        self._reporter = reporter

    def ended(self, call: Call, claim: Claim, error: BaseException) -> bool:
        """Record that the body raised ``error``; ``False`` if a newer claim makes it nobody's business."""
        return self._ended(call, claim, error) or self.policy.mode == "observe"

    def _ended(self, call: Call, claim: Claim, error: BaseException) -> bool:
        if claim.given_back:
            return True
        if claim.replaced:
            return self.settle(call, claim, lambda: claim.replacement, State.COMPLETED)
        # What recorded steps is released, as without anybody who asks: a FAILED record keeps none, and another run
        # would do them again.
        final = call.fails(error) and not claim.stepped
        if final or isinstance(error, self.policy.permanent_errors):
            dump = partial(self._codec.dump_error, error)
            return self.settle(call, claim, dump, State.FAILED, error=error)
        patient = isinstance(error, Exception)
        released = self.release(claim, patient=patient, error=error)
        return released is not False or not patient or not self.superseded(call, claim)

    def release(
        self,
        claim: Claim,
        *,
        patient: bool = True,
        requeue_ms: int | None = None,
        error: BaseException | None = None,
    ) -> bool | None:
        """Give the key back, or leave it to its lease if the store does not answer in time: then ``None``.

        ``False`` if there was nothing to give back: the key is settled, forgotten, or somebody else's.

        Not ``patient``: the process is being ended, and has 0.1 s left (CELERY: a hard limit kills after SIGTERM).
        """
        claim.given_back = True
        identity = claim.record.identity
        give_up = time.monotonic() + (RELEASE_PATIENCE if patient else 0)
        tries = 0

        def free() -> bool:
            nonlocal tries
            tries += 1
            return claim.store.release(identity, token=claim.token, requeue_ms=requeue_ms)

        try:
            done = backoff.persist(free, until=give_up, errors=STORE_ERRORS)
        except STORE_ERRORS as trouble:
            logger.warning(
                "idempotency: could not release %s, its lease will end it: %s", identity, trouble
            )
            return None
        except BaseException:
            with suppress(Exception):
                free()
            raise
        if (
            done or tries > 1
        ):  # a second try finds nothing, if it was the answer of the first that was lost
            self._report(
                signals.released,
                claim.record,
                claim,
                state=self._state_after_release(claim, requeue_ms),
                error=error,
            )
        return done

    def _state_after_release(self, claim: Claim, requeue_ms: int | None) -> State | None:
        """Return what the release made of the record, as :meth:`Store.release` says; ``None``: it is deleted."""
        has_message = claim.record.reserved or self.policy.on_stale == "requeue"
        if has_message and requeue_ms is not None:
            return State.QUEUED
        return State.INTERRUPTED if claim.stepped else None

    def follow(self, claim: Claim) -> None:
        """Do what waits for the end of a transaction that was rolled back: free the key, publish the retry."""
        afterwards, claim.afterwards = claim.afterwards, None
        if afterwards is not None:
            afterwards()

    def superseded(self, call: Call, claim: Claim) -> bool:
        """Has a newer claim the key, so that the end of this run is nobody's business?"""
        held = [claim.record, *([claim.old] if claim.old else [])]
        try:
            found = [claim.store.get(record.identity) for record in held]
        except STORE_ERRORS:
            return False
        now = [record and record.token for record in found]
        if all(token in (None, mine.token) for token, mine in zip(now, held, strict=True)):
            return False
        self._lost(call, claim)
        return True

    def resolve(self, call: Call, claim: Claim, *, patient: bool) -> bool | None:
        """Find out what a commit came to that did not answer: ``True`` if it is committed, ``None`` if nobody knows.

        The row tells, whatever its state: the transaction has written it, and holds it to its end::

            A      claim ─ BEGIN ─ run() ─────────────── settle ─ COMMIT ─✂─ the answer is lost ─ wait for the row
            sweep           (the lease runs out) ─ interrupt                                        │
            database                                               (at work) ─────── committed ─────┴─ COMPLETED
        """
        store = claim.store
        give_up = time.monotonic() + (self.policy.lease_ms / 1000 if patient else 0)
        ask = partial(store.committed, claim.record)
        try:
            committed = backoff.persist(ask, until=give_up, errors=STORE_ERRORS)
        except STORE_ERRORS:
            return None
        if committed:
            self.settled(call, claim)
        return committed

    def settled(
        self,
        call: Call,
        claim: Claim,
        state: State = State.COMPLETED,
        error: BaseException | None = None,
        line: Line | None = None,
    ) -> None:
        """Report that the end state is written."""
        if claim.settled:
            return
        claim.settled = True
        self._report(signals.settled, call, claim, state=state, error=error, line=line)
        if call.on_settled is not None:
            call.on_settled(claim.token)

    def failed(self, call: Call, claim: Claim, error: BaseException) -> None:
        """Tell that the store failed the run, which left nothing behind."""
        self._report(signals.store_failed, call, claim, error=error)

    def _report(self, outcome: Signal, about: Call | Record, claim: Claim, **more: Any) -> None:
        store = claim.store if claim.old is None else None  # that one is two
        self._reporter.report(
            outcome, about.identity, about.task_id, claim.record, store=store, **more
        )

    def _lost(self, call: Call, claim: Claim) -> None:
        observed = self.policy.mode == "observe"
        self._report(signals.lease_lost, call, claim, observed=observed)
        if claim.old is not None and not claim.given_back:
            # It may be the old identity alone that another has by now.
            claim.given_back = True
            with suppress(*STORE_ERRORS):
                claim.store.release(claim.record.identity, token=claim.token)

    def settle(
        self,
        call: Call,
        claim: Claim,
        dump: Callable[[], Stored | None],
        state: Literal[State.COMPLETED, State.FAILED],
        late: BaseException | None = None,
        error: BaseException | None = None,
    ) -> bool:
        """Write the end state, again and again for at least one lease; ``False`` only if another token has the key.

        That of a run in the caller's transaction waits for its commit.

        An exception that a signal handler raises in here does not end it: one that ends the process (``late`` or here)
        leaves it one last try.
        """
        if self._deferred(call, claim, dump, state, error):
            return True
        give_up = time.monotonic() + self.policy.lease_ms / 1000
        trouble: Exception | None = None
        failures = faults = 0
        while not claim.settled:
            try:
                ending = late is not None and not isinstance(late, Exception)
                if trouble is not None and (ending or not backoff.pause(failures, until=give_up)):
                    return self._give_up(call, claim, trouble)
                # A value that makes the codec fail again and again is settled without it.
                value = dump() if faults < MAX_FAULTS else None
                return self._settle_once(call, claim, value, state, error)
            except Exception as failure:  # noqa: BLE001  the store's, a time limit's, or a fault of ours
                trouble = failure
                failures += 1
                faults += not isinstance(failure, STORE_ERRORS)
            except BaseException:
                with suppress(Exception):
                    self._settle_once(call, claim, dump(), state, error)
                raise
            if self.policy.mode == "observe":
                logger.warning(
                    "idempotency: observing: could not settle %s: %s", call.identity, trouble
                )
                return True
        return True

    def _deferred(
        self,
        call: Call,
        claim: Claim,
        dump: Callable[[], Stored | None],
        state: Literal[State.COMPLETED, State.FAILED],
        error: BaseException | None,
    ) -> bool:
        """Leave the end to the caller's transactions, if there are any that the record is no part of."""
        transactions = call.around(claim.store) if call.around is not None else ()
        if not transactions:
            return False
        value = None
        with suppress(Exception):  # as in a settle: what cannot be stored is settled without it
            value = dump()
        alone = replace(call, around=None)
        end = deferred.DeferredEnd(
            claim,
            replace(claim.record, state=state, value=value, deadline_ms=None),
            settle=lambda: self.settle(alone, claim, lambda: value, state, error=error),
            release=lambda: self.release(claim),
        )
        deferred.defer(end, transactions)
        return True

    def condemn(self, call: Call, claim: Claim, error: Exception) -> None:
        """Settle a claim FAILED whose body is not to run.

        Raises:
            StoreUnavailable, StoreMisconfigured: if the store did not take it, once: nothing happened that it had to.
        """
        value = self._codec.dump_error(error)
        self._settle_once(call, claim, value, State.FAILED, error, FAILED_WITHOUT_RUN)

    def _settle_once(
        self,
        call: Call,
        claim: Claim,
        value: Stored | None,
        state: Literal[State.COMPLETED, State.FAILED],
        error: BaseException | None,
        line: Line | None = None,
    ) -> bool:
        policy = self.policy
        done = claim.store.settle(
            claim.record,
            state=state,
            value=value,
            keep_ms=policy.settled_keep_ms if state is State.COMPLETED else policy.failed_keep_ms,
            replaced=claim.replaced,
        )
        if done:
            self.settled(call, claim, state, error, line)
        else:
            self._lost(call, claim)
        return done or policy.mode == "observe"

    def _give_up(self, call: Call, claim: Claim, error: BaseException) -> bool:
        """The effect happened and cannot be recorded: say so as loudly as a library may."""
        self._report(signals.settle_failed, call, claim, error=error)
        return True
