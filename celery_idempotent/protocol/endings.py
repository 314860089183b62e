"""The end of a claim: its end state is written, or its key is released."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from celery_idempotent import backoff, signals
from celery_idempotent.protocol import deferred
from celery_idempotent.protocol.calls import STORE_ERRORS, Call, Codec
from celery_idempotent.protocol.claim import REPORTED, Claim, Phase
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.telling import FAILED_WITHOUT_RUN, Details, Line, Reporter
from celery_idempotent.records import EndState, SettleRequest, State, Stored

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal
    from typing_extensions import Unpack

    from celery_idempotent.records import Record

logger = logging.getLogger(__name__)

#: How long a release tries to reach the store before the key is left to its lease, in seconds.
RELEASE_PATIENCE = 1.0

#: So many failures to serialize a result (a time limit may be one) are worth another try.
MAX_FAULTS = 2


class End(Enum):
    """What became of a claim that was to be ended."""

    SETTLED = "its end state is written, or will be at the caller's commit"
    RELEASED = "the key is free"
    GONE = "nothing to release: the key was settled or forgotten, or has a newer claim"
    LEFT = "the store did not answer in time: the lease ends the claim"
    NEWER_CLAIM = (
        "a newer claim has the key: the result is dropped, and the call goes on as a duplicate"
    )
    ROLLED_BACK = (
        "the database rolled the run back at its end: the key is free, and the call claims it again"
    )


class Commit(Enum):
    """The outcome of a transaction whose COMMIT was not answered."""

    COMMITTED = "its writes and its record are there"
    ROLLED_BACK = "neither is"
    IN_DOUBT = "the database could not be asked in time"


class Settlement(NamedTuple):
    """What a claim is settled with: the state, what serializes the value, the body's error, the line for the log."""

    state: EndState
    dump: Callable[[], Stored | None]
    error: BaseException | None = None
    line: Line | None = None


#: The settlement that a transaction wrote itself, with its value.
COMPLETED = Settlement(State.COMPLETED, lambda: None)


class Endings:
    """Ends the claims of one task under its policy.

    ::

        the body …                          the record is …
        returned a value                    settled COMPLETED
        replaced its task by another one    settled COMPLETED, as replaced
        raised a permanent error            settled FAILED
        failed for good, from enqueue()     settled FAILED; released if it recorded steps
        raised anything else                released

    A settle is tried for a whole lease: the effect has happened, and without a record another run would repeat it. A
    release is tried for one second: nothing has happened, and the lease frees the key anyway. Neither can change a
    newer claim, which has another token.
    """

    def __init__(self, policy: Policy, codec: Codec, reporter: Reporter) -> None:
        self.name = reporter.task
        self.policy = policy
        self._codec = codec
        self._reporter = reporter

    def end_failed(self, call: Call, claim: Claim, error: BaseException) -> End:
        """End the claim of a body that raised ``error``."""
        if claim.phase is Phase.RELEASED:
            return End.RELEASED
        if claim.replaced:
            return self.settle(call, claim, Settlement(State.COMPLETED, lambda: claim.replacement))
        # A FAILED record loses its steps, and the next run would repeat them. So with steps only a permanent error is
        # FAILED.
        final = call.fails(error) and not claim.stepped
        if final or isinstance(error, self.policy.permanent_errors):
            dump = partial(self._codec.dump_error, error)
            return self.settle(call, claim, Settlement(State.FAILED, dump, error))
        patient = isinstance(error, Exception)
        end = self.release(claim, patient=patient, error=error)
        if end is End.GONE and patient and self.has_newer_claim(call, claim):
            return End.NEWER_CLAIM
        return end

    # -- to release ----------------------------------------------------------------------------------------------------

    def release(
        self,
        claim: Claim,
        *,
        patient: bool = True,
        requeue_ms: int | None = None,
        error: BaseException | None = None,
    ) -> End:
        """Give the key back: RELEASED, or GONE, or LEFT to its lease if the store does not answer in time.

        Not ``patient``: the process is being ended, and has 0.1 s left (CELERY: a hard limit kills after SIGTERM).
        """
        claim.phase = Phase.RELEASED
        identity = claim.record.identity
        tries = 0

        def free() -> bool:
            nonlocal tries
            tries += 1
            return claim.store.release(identity, token=claim.token, requeue_ms=requeue_ms)

        try:
            until = time.monotonic() + (RELEASE_PATIENCE if patient else 0)
            released = backoff.persist(free, until=until, errors=STORE_ERRORS)
        except STORE_ERRORS as trouble:
            logger.warning(
                "idempotency: could not release %s, its lease will end it: %s", identity, trouble
            )
            return End.LEFT
        except BaseException:
            with suppress(Exception):
                free()
            raise
        # The answer of an earlier try may have been lost: that try released the key, and the last one finds nothing.
        if released or tries > 1:
            state = self._state_after_release(claim, requeue_ms)
            self._report(signals.released, claim.record, claim, state=state, error=error)
        return End.RELEASED if released else End.GONE

    def _state_after_release(self, claim: Claim, requeue_ms: int | None) -> State | None:
        """Return what the release made of the record, as :meth:`Store.release` says; ``None``: it is deleted."""
        has_message = claim.record.reserved or self.policy.on_stale == "requeue"
        if has_message and requeue_ms is not None:
            return State.QUEUED
        return State.INTERRUPTED if claim.stepped else None

    def has_newer_claim(self, call: Call, claim: Claim) -> bool:
        """Ask whether a newer claim has the key; if so, report that the lease is lost."""
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

    # -- to settle -----------------------------------------------------------------------------------------------------

    def settle(
        self, call: Call, claim: Claim, settlement: Settlement, *, at_exit: bool = False
    ) -> End:
        """Try, for up to one lease, to write the end state: SETTLED, NEWER_CLAIM, or LEFT if every try failed.

        ``at_exit`` and in observe mode there is only one try. The end of a run in the caller's transaction is written
        after that commits; here it counts as SETTLED. A signal handler may raise while the store answers::

            settle ─ [SoftTimeLimitExceeded] ─▶ a failure like the store's: settle again
            settle ─ [SystemExit] ────────────▶ the process has 0.1 s left: one last try, as with ``at_exit``
        """
        if self._defer(call, claim, settlement):
            return End.SETTLED
        claim.settling = time.monotonic()
        if at_exit:
            return self._last_try(call, claim, settlement)
        give_up = claim.settling + self.policy.lease_ms / 1000
        trouble: Exception | None = None
        failures = faults = 0
        while claim.phase not in REPORTED:
            try:
                if trouble is not None and (
                    self.policy.mode == "observe" or not backoff.pause(failures, until=give_up)
                ):
                    return self._give_up(call, claim, trouble)
                # If the value cannot be serialized after several tries, the end is written without a value.
                value = settlement.dump() if faults < MAX_FAULTS else None
                return self._settle_once(call, claim, settlement, value)
            except Exception as failure:  # noqa: BLE001, PERF203  of the store, a time limit, the codec
                trouble = failure
                failures += 1
                faults += not isinstance(failure, STORE_ERRORS)
            except BaseException:
                if claim.phase not in REPORTED:
                    self._last_try(call, claim, settlement)
                raise
        # A time limit struck while the end was reported.
        return End.SETTLED if claim.phase is Phase.SETTLED else End.LEFT

    def _last_try(self, call: Call, claim: Claim, settlement: Settlement) -> End:
        try:
            return self._settle_once(call, claim, settlement, settlement.dump())
        except Exception as error:  # noqa: BLE001  as above
            return self._give_up(call, claim, error)

    def _settle_once(
        self, call: Call, claim: Claim, settlement: Settlement, value: Stored | None
    ) -> End:
        state = settlement.state
        request = SettleRequest(
            record=claim.record,
            state=state,
            value=value,
            keep_ms=self.policy.keep_ms_of(state),
            replaced=claim.replaced,
        )
        if not claim.store.settle(request):
            self._lost(call, claim)
            return End.NEWER_CLAIM
        self.report_settled(call, claim, settlement)
        return End.SETTLED

    def _give_up(self, call: Call, claim: Claim, error: Exception) -> End:
        """Report that the body took effect, and that its end cannot be recorded; once.

        The phase comes first. A time limit that strikes while this is logged must not begin the settle again::

            settle ✗ … give up ─ CRITICAL ─ [SoftTimeLimitExceeded] ─▶ ENDED: no other try, no second CRITICAL
        """
        claim.phase = Phase.ENDED
        if self.policy.mode == "observe":
            identity = call.identity
            logger.warning("idempotency: observing: could not settle %s: %s", identity, error)
        else:
            self._report(signals.settle_failed, call, claim, error=error)
        return End.LEFT

    def condemn(self, call: Call, claim: Claim, error: Exception) -> None:
        """Settle a claim FAILED whose body is not to run.

        Raises:
            StoreUnavailable, StoreMisconfigured: if the only try failed. No effect happened, so that is no loss.
        """
        dump = partial(self._codec.dump_error, error)
        settlement = Settlement(State.FAILED, dump, error, FAILED_WITHOUT_RUN)
        self._settle_once(call, claim, settlement, dump())

    def _defer(self, call: Call, claim: Claim, settlement: Settlement) -> bool:
        """Let the end wait for the COMMIT of those of the caller's transactions that the record is not part of."""
        transactions = call.around(claim.store) if call.around is not None else ()
        if not transactions:
            return False
        value = None
        with suppress(Exception):  # as in a settle: without a value, if it cannot be serialized
            value = settlement.dump()
        # around=None: this settle must not be deferred again.
        alone, end = replace(call, around=None), settlement._replace(dump=lambda: value)
        seen = replace(claim.record, state=settlement.state, value=value, deadline_ms=None)
        deferred.defer(
            deferred.DeferredEnd(
                claim,
                seen,
                settle=lambda: self.settle(alone, claim, end),
                release=lambda: self.release(claim),
            ),
            transactions,
        )
        claim.phase = Phase.DEFERRED
        return True

    # -- of a transaction ----------------------------------------------------------------------------------------------

    def commit_of(self, call: Call, claim: Claim, *, patient: bool) -> Commit:
        """Ask the database whether the transaction was committed: the answer to its COMMIT was lost.

        The record's row decides: the transaction wrote it, and keeps it locked until it ends::

            A      claim ─ BEGIN ─ run() ─────────────── settle ─ COMMIT ─✂─ the answer is lost ─ wait for the row
            sweep           (the lease runs out) ─ interrupt                                        │
            database                                               (running) ─────── committed ─────┴─ COMPLETED
        """
        store = claim.store
        until = time.monotonic() + (self.policy.lease_ms / 1000 if patient else 0)
        ask = partial(store.committed, claim.record)
        try:
            if not backoff.persist(ask, until=until, errors=STORE_ERRORS):
                return Commit.ROLLED_BACK
        except STORE_ERRORS:
            return Commit.IN_DOUBT
        self.report_settled(call, claim)
        return Commit.COMMITTED

    # -- reports -------------------------------------------------------------------------------------------------------

    def report_settled(self, call: Call, claim: Claim, end: Settlement = COMPLETED) -> None:
        """Report that the end state is written. The phase comes first, so that it is reported once."""
        if claim.phase is Phase.SETTLED:
            return
        claim.phase = Phase.SETTLED
        took = None if claim.settling is None else time.monotonic() - claim.settling
        state, error, line = end.state, end.error, end.line
        told = signals.settled
        self._report(told, call, claim, state=state, error=error, seconds=took, line=line)
        if call.on_settled is not None:
            call.on_settled(claim.token)

    def report_store_failed(self, call: Call, claim: Claim, error: BaseException) -> None:
        """Report that the store failed, and that the run left nothing behind."""
        self._report(signals.store_failed, call, claim, error=error)

    def _lost(self, call: Call, claim: Claim) -> None:
        """Report that a newer claim has the key; once, for the end of a run may find that out several times."""
        if claim.superseded:
            return
        claim.superseded = True
        observed = self.policy.mode == "observe"
        self._report(signals.lease_lost, call, claim, observed=observed)
        if claim.old is not None and claim.phase is not Phase.RELEASED:
            # The newer claim may be one of the old identity alone: release the new one.
            claim.phase = Phase.RELEASED
            with suppress(*STORE_ERRORS):
                claim.store.release(claim.record.identity, token=claim.token)

    def _report(
        self, outcome: Signal, about: Call | Record, claim: Claim, **details: Unpack[Details]
    ) -> None:
        store = claim.store if claim.old is None else None  # that one stands for two records
        self._reporter.report(
            outcome, about.identity, about.task_id, claim.record, store=store, **details
        )
