"""The end of a claim: its end state is written, or its key is released."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import replace
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from celery_idempotent import backoff, signals
from celery_idempotent.protocol import at_commit
from celery_idempotent.protocol.calls import STORE_ERRORS, Call, Codec
from celery_idempotent.protocol.claim import REPORTED, Claim, Phase
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.settlement import Settlement
from celery_idempotent.protocol.telling import FAILED_WITHOUT_RUN, Details, Reporter
from celery_idempotent.records import SettleRequest, State, Stored

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal
    from typing_extensions import Unpack

    from celery_idempotent.records import Record

logger = logging.getLogger(__name__)

#: How long a release tries to reach the store, in seconds; after that the lease ends the claim.
RELEASE_RETRY_SECONDS = 1.0

#: After so many failures to serialize a value the end is written without it. Two, for one may be a time limit.
MAX_FAULTS = 2


class End(Enum):
    """What became of a claim that was to be ended."""

    SETTLED = "its end state is written; in the caller's transaction it will be when that commits"
    RELEASED = "the key is free"
    GONE = "the store has nothing to release: the key was settled, forgotten or claimed anew"
    LEFT_TO_LEASE = "the store did not answer in time: the claim ends with its lease"
    NEWER_CLAIM = (
        "it is known that a newer claim has the key: the result is dropped, the call is a duplicate"
    )
    ROLLED_BACK = "the database rolled the run back at its end: the call claims the key again"


class Commit(Enum):
    """The outcome of a transaction whose COMMIT was not answered."""

    COMMITTED = "its writes and its record are there"
    ROLLED_BACK = "neither is"
    IN_DOUBT = "the database could not be asked in time"


#: For the report of an end that the body's own transaction wrote: there is nothing to serialize.
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
        the same, called by enqueue(),        settled FAILED: the client asks for the outcome
        and the body recorded no steps

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
        if claim.phase is Phase.RELEASED:  # for a retry or a replacement, by the body
            return End.RELEASED
        if claim.replaced:
            return self.settle(call, claim, Settlement(State.COMPLETED, lambda: claim.replacement))
        # A FAILED record has no steps. The client may send the request again, and the new run would repeat them: so a
        # run with steps is released. After a permanent error there is no new run.
        final = call.fails(error) and not claim.stepped
        if final or isinstance(error, self.policy.permanent_errors):
            dump = partial(self._codec.dump_error, error)
            settlement = Settlement(State.FAILED, dump, error, result=call.result_of(error))
            return self.settle(call, claim, settlement)
        # After SystemExit and the like the process has a moment left, and the lease ends the claim anyway.
        at_exit = not isinstance(error, Exception)
        end = self.release(claim, at_exit=at_exit, error=error)
        if end is End.GONE and not at_exit and self.report_newer_claim(call, claim):
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

        ``requeue_ms``: the task's retry is about to be published, and its message counts as lost after so long.
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
        # If the last try found nothing to release, an earlier one may have released the key, and its answer was lost.
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

    def report_newer_claim(self, call: Call, claim: Claim) -> bool:
        """Report that the lease is lost, if a newer claim has the key; return whether it has."""
        # While keys change it has two.
        claimed = [record for record in (claim.record, claim.before) if record is not None]
        try:
            found = [claim.store.get(record.identity) for record in claimed]
        except STORE_ERRORS:
            return False
        # A record that is gone was released or forgotten: nobody has claimed the key since.
        pairs = zip(found, claimed, strict=True)
        if all(now is None or now.token == ours.token for now, ours in pairs):
            return False
        self._lose_to_newer_claim(call, claim)
        return True

    # -- to settle -----------------------------------------------------------------------------------------------------

    def settle(
        self, call: Call, claim: Claim, settlement: Settlement, *, at_exit: bool = False
    ) -> End:
        """Try, for up to one lease, to write the end state: SETTLED, NEWER_CLAIM, or LEFT_TO_LEASE if every try failed.

        ``at_exit`` (the process is being ended) and in observe mode there is only one try. The end of a run in the
        caller's transaction is written after that commits; here it counts as SETTLED. A signal handler may raise at any
        point of the loop, also in a pause between two tries::

            settle ─ [SoftTimeLimitExceeded] ─▶ a failure like the store's: settle again
            settle ─ [SystemExit] ────────────▶ the process ends in a moment: one last try, as with ``at_exit``
        """
        if self._wait_for_commit(call, claim, settlement):
            return End.SETTLED
        claim.settling_since = time.monotonic()
        if at_exit:
            return self._last_try(call, claim, settlement)
        give_up = claim.settling_since + self.policy.lease_ms / 1000
        last_error: Exception | None = None
        failures = faults = 0
        while claim.phase not in REPORTED:
            try:
                if last_error is not None and (
                    self.policy.mode == "observe" or not backoff.pause(failures, until=give_up)
                ):
                    return self._give_up(call, claim, last_error)
                value = settlement.dump() if faults < MAX_FAULTS else None
                return self._settle_once(call, claim, settlement, value)
            except Exception as failure:  # noqa: BLE001, PERF203  of the store, a time limit, the codec
                last_error = failure
                failures += 1
                faults += not isinstance(failure, STORE_ERRORS)
                # The task's result goes with the record. It may be what failed: from now on Celery stores it, and finds
                # it there if only the answer was lost.
                settlement = settlement._replace(result=None)
            except BaseException:
                if claim.phase not in REPORTED:
                    self._last_try(call, claim, settlement)
                raise
        # A time limit struck while the end was reported: the loop caught it, and there is nothing left to try.
        return End.SETTLED if claim.phase is Phase.SETTLED else End.LEFT_TO_LEASE

    def _last_try(self, call: Call, claim: Claim, settlement: Settlement) -> End:
        try:
            # Without the result: the process ends before the task could.
            alone = settlement._replace(result=None)
            return self._settle_once(call, claim, alone, settlement.dump())
        except Exception as error:  # noqa: BLE001  as above
            return self._give_up(call, claim, error)

    def _settle_once(
        self, call: Call, claim: Claim, settlement: Settlement, value: Stored | None
    ) -> End:
        request = SettleRequest(
            record=claim.record,
            state=settlement.state,
            value=value,
            keep_ms=self.policy.keep_ms_of(settlement.state),
            replaced=claim.replaced,
        )
        if not settlement.write(claim.store, request):
            self._lose_to_newer_claim(call, claim)
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

    def _wait_for_commit(self, call: Call, claim: Claim, settlement: Settlement) -> bool:
        """Let the end wait for the COMMIT of the caller's transactions, except one that has the record in it."""
        transactions = call.around(claim.store) if call.around is not None else ()
        if not transactions:
            return False
        value = None
        with suppress(Exception):  # as in a settle: without a value, if it cannot be serialized
            value = settlement.dump()
        # Without ``around``: after the commit, the settle is not to wait again.
        call_then = replace(call, around=None)
        settlement_then = settlement._replace(dump=lambda: value, result=None)
        # For duplicates in the same transaction, which are answered before the store has this.
        for_duplicates = replace(
            claim.record, state=settlement.state, value=value, deadline_ms=None
        )
        at_commit.wait_for_commit(
            at_commit.EndAtCommit(
                claim,
                for_duplicates,
                settle=lambda: self.settle(call_then, claim, settlement_then),
                release=lambda: self.release(claim),
            ),
            transactions,
        )
        claim.phase = Phase.AWAITS_COMMIT
        return True

    # -- of a transaction ----------------------------------------------------------------------------------------------

    def ask_commit(self, call: Call, claim: Claim, *, at_exit: bool) -> Commit:
        """Ask the database whether the transaction was committed: the answer to its COMMIT was lost.

        The record's row decides: the transaction has it locked until it ends, and who writes to it waits for that::

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

    def report_settled(self, call: Call, claim: Claim, end: Settlement = _IN_TRANSACTION) -> None:
        """Report that the end state is written. The phase comes first, so that it is reported once."""
        if claim.phase is Phase.SETTLED:
            return
        claim.phase = Phase.SETTLED
        took = None if claim.settling_since is None else time.monotonic() - claim.settling_since
        about: Details = {"state": end.state, "error": end.error, "seconds": took, "line": end.line}
        self._report(signals.settled, call, claim, **about)
        if call.on_settled is not None:
            call.on_settled(claim.token)

    def report_store_failed(self, call: Call, claim: Claim, error: BaseException) -> None:
        """Report that the store failed, and that the run left nothing behind."""
        self._report(signals.store_failed, call, claim, error=error)

    def _lose_to_newer_claim(self, call: Call, claim: Claim) -> None:
        """Report that a newer claim has the key, once, and let go of the new identity where the claim has two."""
        if claim.superseded:
            return
        claim.superseded = True
        self._report(signals.lease_lost, call, claim, observed=self.policy.mode == "observe")
        if claim.before is not None and claim.phase is not Phase.RELEASED:
            # Two identities, and the newer claim may have the old one alone: the new one is not to wait for its lease.
            claim.phase = Phase.RELEASED
            with suppress(*STORE_ERRORS):
                claim.store.release(claim.record.identity, token=claim.token)

    def _report(
        self, outcome: Signal, about: Call | Record, claim: Claim, **details: Unpack[Details]
    ) -> None:
        # A claim of two identities has a store that writes both. Counters are for the task's own, which is the default.
        store = claim.store if claim.before is None else None
        self._reporter.report(
            outcome, about.identity, about.task_id, claim.record, store=store, **details
        )
