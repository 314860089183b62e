"""Ends a claim: its end state is written, or its key is released."""

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
from celery_idempotent.errors import LeaseLost, StoreUnavailable
from celery_idempotent.protocol.calls import STORE_ERRORS, Call, Codec, OutcomeResult
from celery_idempotent.protocol.claim import REPORTED, Claim, Phase
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.telling import FAILED_WITHOUT_RUN, Details, Line, Reporter
from celery_idempotent.records import EndState, SettledWith, SettleRequest, State, Stored

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal
    from typing_extensions import Unpack

    from celery_idempotent.records import Record
    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: How long a release tries to reach the store, in seconds; after that the lease ends the claim.
RELEASE_RETRY_SECONDS = 1.0

#: After so many errors that are not the store's, it is probably the value that cannot be serialized: the end state is
#: written without it. Two, because one may be a time limit.
MAX_OTHER_ERRORS = 2

#: After so many refusals in a row the end state is written without the value.
MAX_REFUSALS = 2
#: A value of so many bytes may be the reason why a store that answers does not take a record.
LARGE_VALUE = 64 * 1024


class End(Enum):
    """What became of a claim at the end of its run."""

    SETTLED = "its end state is written; in the caller's transaction it will be when that commits"
    RELEASED = "the key is free"
    #: It was swept, settled, forgotten or claimed anew; or an earlier try released it, whose answer was lost.
    GONE = "the store has nothing to release"
    LEFT_TO_LEASE = "the store did not answer in time: the claim ends with its lease"
    NEWER_CLAIM = "a newer claim has the key: the result is dropped, the call is a duplicate"
    #: Returned by an atomic run (:mod:`.atomic`), not by :class:`Endings`.
    ROLLED_BACK = "the database rolled the run back at its end: the call claims the key again"


class Commit(Enum):
    """The outcome of a transaction that raised after its settle was written."""

    COMMITTED = "its writes and the end state are there"
    ROLLED_BACK = "neither is there; the key may have a newer claim by now"
    IN_DOUBT = "the database could not be asked in time"


class Settlement(NamedTuple):
    """How a claim is to be settled."""

    state: EndState
    #: Serializes the result or the exception of the body; called for each try.
    dump: Callable[[], Stored | None]
    #: The exception, for the report.
    error: BaseException | None = None
    #: What is logged instead of the usual line.
    line: Line | None = None
    #: Celery's result, if it may be written together with the record.
    result: OutcomeResult | None = None

    def write(self, store: Store, request: SettleRequest) -> bool:
        """Write the end state, and the result with it where that can be; ``False``: a newer claim has the key."""
        if self.result is None or (result := self.result.write_for(store, request.value)) is None:
            return store.settle(request)
        written = store.settle_with_result(request, result)
        if written is SettledWith.RESULT:
            self.result.note_written()
        return written is not SettledWith.LOST


#: For the report of a settle that was part of the body's transaction: it is written, nothing is to be serialized.
_IN_TRANSACTION = Settlement(State.COMPLETED, lambda: None)


class Endings:
    """Ends the claims of one task under its policy.

    ::

        the body …                            the record is …
        returned a value                      settled COMPLETED
        replaced its task by another one      settled COMPLETED, as replaced
        raised a permanent error              settled FAILED
        raised Retry, Ignore, Reject, or      released
        what ends the process
        raised any other exception            released
        the same, in a task published by      settled FAILED: the client asks for the outcome
        enqueue(), with no steps recorded

    A settle is tried for a whole lease: without it another run would repeat what the body did. A release is tried for
    one second: the call is to be repeated anyway, and if the release does not free the key, the lease does. Neither can
    change a newer claim, which has another token.
    """

    def __init__(self, policy: Policy, codec: Codec, reporter: Reporter) -> None:
        self.name = reporter.task
        self.policy = policy
        self._codec = codec
        self._reporter = reporter

    def end_failed(self, call: Call, claim: Claim, error: BaseException) -> End:
        """End the claim of a body that raised ``error``."""
        if claim.phase is Phase.RELEASED:  # for a retry or a replacement, by the body
            return End.RELEASED
        if claim.replaced:
            return self.settle(call, claim, Settlement(State.COMPLETED, lambda: None))
        # Settling FAILED deletes the steps. A client may repeat a request that failed, and the new run would repeat
        # them: so a run with steps is released, which keeps them. After a permanent error there is no new run: FAILED.
        keep_failure = call.keep_failure and not claim.has_steps
        lost = isinstance(error, LeaseLost)  # tells of the claim, and is no failure of the task
        is_permanent = keep_failure or isinstance(error, self.policy.permanent_errors)
        if is_permanent and not lost and call.fails(error):
            dump = partial(self._codec.dump_error, error)
            settlement = Settlement(State.FAILED, dump, error)
            return self.settle(call, claim, settlement)
        # After SystemExit and the like the process has a moment left, and the lease ends the claim anyway.
        at_exit = not isinstance(error, Exception)
        if at_exit and time.monotonic() >= call.ends_at:
            # A pool sends SIGTERM before SIGKILL at a hard time limit: that is a crash, or it would repeat for ever.
            return End.LEFT_TO_LEASE
        end = self.release(claim, at_exit=at_exit, error=error)
        if end is End.GONE and not at_exit and (self.check_newer_claim(call, claim) or lost):
            return End.NEWER_CLAIM
        return end

    # -- to release ----------------------------------------------------------------------------------------------------

    def release(
        self,
        claim: Claim,
        *,
        at_exit: bool = False,
        requeue_ms: int | None = None,
        error: BaseException | None = None,
    ) -> End:
        """Give the key back: RELEASED, GONE, or LEFT_TO_LEASE if the store does not answer in time.

        ``requeue_ms``: the call comes again. If not within this time, a sweep sends the record's message, if any.
        ``at_exit`` there is one try: at a hard time limit Celery sends SIGTERM, and 0.1 s later SIGKILL.
        """
        # Before the store is asked: whatever strikes meanwhile, this claim is not renewed or settled any more.
        claim.phase = Phase.RELEASED
        identity = claim.record.identity
        tries = 0

        def free() -> bool:
            nonlocal tries
            tries += 1
            return claim.store.release(identity, token=claim.token, requeue_ms=requeue_ms)

        try:
            until = time.monotonic() + (0 if at_exit else RELEASE_RETRY_SECONDS)
            released = backoff.persist(free, until=until, errors=STORE_ERRORS)
        except STORE_ERRORS as trouble:
            logger.warning(
                "idempotency: could not release %s, its lease will end it: %s", identity, trouble
            )
            return End.LEFT_TO_LEASE
        except BaseException:
            # A signal handler raised, and the process may be about to end: one last try.
            with suppress(Exception):
                free()
            raise
        # An earlier try may have released the key, and its answer was lost: report that, too. But the last one found
        # nothing to release: return GONE for that, and end_failed() looks for a newer claim.
        if released or tries > 1:
            state = self._state_after_release(claim, requeue_ms)
            self._report(signals.released, claim.record, claim, state=state, error=error)
        return End.RELEASED if released else End.GONE

    def _state_after_release(self, claim: Claim, requeue_ms: int | None) -> State | None:
        """Return what the release made of the record (see :meth:`Store.release`); ``None``: it is deleted."""
        if requeue_ms is not None and claim.requeues:
            return State.QUEUED
        return State.INTERRUPTED if claim.has_steps else None

    def check_newer_claim(self, call: Call, claim: Claim) -> bool:
        """Return whether the store has a newer claim of the key; if so, report that this one lost its lease."""
        try:
            found = claim.store.get(claim.record.identity)
        except STORE_ERRORS:
            return False
        # A record that is gone was released or forgotten: the key is free.
        if found is None or found.token == claim.token:
            return False
        self._report_lease_lost(call, claim)
        return True

    # -- to settle -----------------------------------------------------------------------------------------------------

    def settle(
        self, call: Call, claim: Claim, settlement: Settlement, *, at_exit: bool = False
    ) -> End:
        """Try, for up to one lease, to write the end state: SETTLED, NEWER_CLAIM, or LEFT_TO_LEASE if every try failed.

        ``at_exit`` (the process is being ended) and in observe mode there is only one try. A run in the caller's
        transaction is settled after that commits; here it counts as SETTLED. A signal handler may raise at any point of
        the loop, also in a pause between two tries::

            settle ─ [SoftTimeLimitExceeded] ─▶ the try failed, as by an error of the store: settle again
            settle ─ [SystemExit] ────────────▶ the process ends in a moment: one last try, as with ``at_exit``
        """
        if self._settle_after_commit(call, claim, settlement):
            return End.SETTLED
        claim.settling_since = time.monotonic()
        if at_exit:
            return self._last_try(call, claim, settlement)
        give_up = claim.settling_since + self.policy.lease_ms / 1000
        last_error: Exception | None = None
        value: Stored | None = None
        tries_failed = other_errors = refused = 0
        while claim.phase not in REPORTED:
            try:
                if last_error is not None and (
                    self.policy.mode == "observe" or not backoff.pause(tries_failed, until=give_up)
                ):
                    return self._give_up(call, claim, last_error)
                refused = refused + 1 if self._refuses(claim, value, last_error) else 0
                if refused == MAX_REFUSALS:
                    logger.warning(
                        "idempotency: the store does not take the result of %s (%s), which is settled without it: "
                        "duplicates will look for it in the result backend",
                        call.identity,
                        last_error,
                    )
                without = refused >= MAX_REFUSALS or other_errors >= MAX_OTHER_ERRORS
                value = None if without else settlement.dump()
                return self._settle_once(call, claim, settlement, value)
            except Exception as failure:  # noqa: BLE001, PERF203  of the store, a time limit, the codec
                last_error = failure
                tries_failed += 1
                other_errors += not isinstance(failure, STORE_ERRORS)
                # The first try also writes Celery's task result, and that may be what failed: later tries write the
                # record alone, and Celery stores the result, a second time if only the answer was lost.
                settlement = settlement._replace(result=None)
            except BaseException:
                if claim.phase not in REPORTED:
                    self._last_try(call, claim, settlement)
                raise
        # A time limit struck during the report, and the loop caught it: there is nothing left to try.
        return End.SETTLED if claim.phase is Phase.SETTLED else End.LEFT_TO_LEASE

    @staticmethod
    def _refuses(claim: Claim, value: Stored | None, error: Exception | None) -> bool:
        """Is it the value that the store did not take? Then it answers a question, and is not merely away.

        A server that ends the connection of a client whose command is too large looks like one that is lost. An error
        that may pass is therefore taken for a refusal only with a large value.
        """
        if value is None or not isinstance(error, STORE_ERRORS):
            return False
        if isinstance(error, StoreUnavailable) and len(value.body) < LARGE_VALUE:
            return False
        try:
            claim.store.get(claim.record.identity)
        except STORE_ERRORS:
            return False
        return True

    def _last_try(self, call: Call, claim: Claim, settlement: Settlement) -> End:
        try:
            # Without Celery's task result: the process ends before the task can succeed or fail.
            record_alone = settlement._replace(result=None)
            return self._settle_once(call, claim, record_alone, settlement.dump())
        except Exception as error:  # noqa: BLE001  as above
            return self._give_up(call, claim, error)

    def _settle_once(
        self, call: Call, claim: Claim, settlement: Settlement, value: Stored | None
    ) -> End:
        request = SettleRequest(
            record=claim.record,
            state=settlement.state,
            value=value,
            keep_ms=self.policy.settled_keep_ms,
            replaced=claim.replaced,
        )
        if not settlement.write(claim.store, request):
            self._report_lease_lost(call, claim)
            return End.NEWER_CLAIM
        self.report_settled(call, claim, settlement)
        return End.SETTLED

    def _give_up(self, call: Call, claim: Claim, error: Exception) -> End:
        """Report once that the body is over, and that its end state cannot be written.

        The phase comes first. A time limit that strikes while this is logged must not begin the settle again::

            settle ✗ … give up ─ CRITICAL ─ [SoftTimeLimitExceeded] ─▶ ENDED: no other try, no second CRITICAL
        """
        claim.phase = Phase.ENDED
        if self.policy.mode == "observe":
            logger.warning("idempotency: observing: could not settle %s: %s", call.identity, error)
        else:
            self._report(signals.settle_failed, call, claim, error=error)
        return End.LEFT_TO_LEASE

    def fail_without_run(self, call: Call, claim: Claim, error: Exception) -> None:
        """Settle a claim FAILED whose body is not to run.

        Raises:
            StoreUnavailable, StoreMisconfigured: if the only try failed. No effect happened, so that is no loss.
        """
        dump = partial(self._codec.dump_error, error)
        settlement = Settlement(State.FAILED, dump, error, FAILED_WITHOUT_RUN)
        self._settle_once(call, claim, settlement, dump())

    def _settle_after_commit(self, call: Call, claim: Claim, settlement: Settlement) -> bool:
        """Put the settle off until the caller's transactions commit; ``False``: none is open, or one has the record.

        A rollback drops the hooks, and the lease ends the claim.
        """
        on_commits = call.open_transactions(claim.store) if call.open_transactions else ()
        if not on_commits:
            return False
        value = None
        with suppress(Exception):  # as in settle(): without a value, if it cannot be serialized
            value = settlement.dump()
        call_then = replace(call, open_transactions=None)  # or the settle would be put off again
        settlement_then = settlement._replace(dump=lambda: value, result=None)
        uncommitted = len(on_commits)

        def after_commit() -> None:
            nonlocal uncommitted
            uncommitted -= 1
            if not uncommitted:
                self.settle(call_then, claim, settlement_then)

        for on_commit in on_commits:
            on_commit(after_commit)
        claim.phase = Phase.AWAITS_COMMIT
        return True

    # -- of a transaction ----------------------------------------------------------------------------------------------

    def find_commit_outcome(self, call: Call, claim: Claim, *, at_exit: bool) -> Commit:
        """Find out whether the transaction was committed: its COMMIT raised, or the answer to it was lost.

        If it was, the record is settled. Its row is locked until the transaction ends, and every writer waits for that,
        this question and a sweep as well::

            run       claim ─ BEGIN ─ body ─ settle ─ COMMIT ─✂─ no answer ─ wait for the row … COMPLETED: committed
            sweep                                      (the lease runs out) ─ wait for the row … COMPLETED: no crash
            database                                  COMMIT is running ─────────────────────── committed
        """
        until = time.monotonic() + (0 if at_exit else self.policy.lease_ms / 1000)
        ask = partial(claim.store.committed, claim.record)
        try:
            if not backoff.persist(ask, until=until, errors=STORE_ERRORS):
                return Commit.ROLLED_BACK
        except STORE_ERRORS:
            return Commit.IN_DOUBT
        self.report_settled(call, claim)
        return Commit.COMMITTED

    # -- reports -------------------------------------------------------------------------------------------------------

    def report_settled(
        self, call: Call, claim: Claim, settlement: Settlement = _IN_TRANSACTION
    ) -> None:
        """Report that the end state is written. The phase comes first, so that it is reported once."""
        if claim.phase is Phase.SETTLED:
            return
        claim.phase = Phase.SETTLED
        took = None if claim.settling_since is None else time.monotonic() - claim.settling_since
        about: Details = {"state": settlement.state, "error": settlement.error, "seconds": took}
        about["line"] = settlement.line
        self._report(signals.settled, call, claim, **about)
        if call.on_settled is not None:
            call.on_settled(claim.token, settlement.state)

    def report_store_failed(self, call: Call, claim: Claim, error: BaseException) -> None:
        """Report that the store failed, and that the run left nothing behind."""
        self._report(signals.store_failed, call, claim, error=error)

    def _report_lease_lost(self, call: Call, claim: Claim) -> None:
        """Report once that a newer claim has the key."""
        if claim.superseded:
            return
        claim.superseded = True
        self._report(signals.lease_lost, call, claim, observed=self.policy.mode == "observe")

    def _report(
        self, outcome: Signal, about: Call | Record, claim: Claim, **details: Unpack[Details]
    ) -> None:
        self._reporter.report(
            outcome, about.identity, about.task_id, claim.record, store=claim.store, **details
        )
