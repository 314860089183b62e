"""claim → run → settle | release | replay: the one place that spells the protocol out.

Knows the store and the policy, nothing of Celery. Callers, a task's (``celery/running.py``) and a view's, hand in the
call, its body and the codec of its values, and get one :data:`CallResult`, or the exception that the body raised::

    claim ──▶ Claimed ──▶ body() ──▶ value ─────────▶ settle COMPLETED ──▶ Ran(value)
      │                     │                             └─ another token ──▶ claim again, as a duplicate
      │                     ├──▶ permanent error ────▶ settle FAILED ─────▶ raised
      │                     └──▶ any other ──────────▶ release ───────────▶ raised
      ├────▶ Settled ─────▶ Replay(record)
      ├────▶ Held ────────▶ Conflict(record)
      ├────▶ Mismatched ──▶ FingerprintMismatch
      └────▶ no answer ───▶ StoreFailed(error)
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from celery_idempotent import backoff, errors, signals
from celery_idempotent.protocol import unfinished
from celery_idempotent.protocol.atomic import AtomicRun, in_transaction
from celery_idempotent.protocol.calls import (
    STORE_ERRORS,
    Body,
    BodyOutcome,
    Call,
    CallResult,
    Codec,
    Conflict,
    Ran,
    Replay,
    StoreFailed,
)
from celery_idempotent.protocol.claim import AT_WORK, Claim, Phase, claim_var
from celery_idempotent.protocol.claiming import AnsweredAttempt, Claiming
from celery_idempotent.protocol.endings import End, Endings, Settlement
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.telling import Details, Reporter
from celery_idempotent.records import Claimed, Held, Mismatched, Record, Settled, State
from celery_idempotent.stores.base import ATTEMPT_BYTES, Store

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal
    from typing_extensions import Unpack

logger = logging.getLogger(__name__)

#: A duplicate that waits for the holder looks again after these times, in seconds.
_FIRST_LOOK, _LONGEST_LOOK = 0.02, 0.5

#: A run that its database rolled back at the end waits so long at first, so that those who collided do not meet again.
_FIRST_REPEAT = 0.02

_MISMATCH = (
    "{} belongs to task {}, which was called with other arguments: a key stands for one intention. Use another key, or "
    "take what may differ out of idempotency_fingerprint."
)


class Runner:
    """Runs calls of one task under its policy; ``sender`` returns who the signals come from."""

    def __init__(
        self,
        name: str,
        *,
        policy: Policy,
        store: Callable[[], Store],
        codec: Codec,
        sender: Callable[[], object],
    ) -> None:
        self.name = name
        self.policy = policy
        self._store = store
        self._codec = codec
        self.reporter = Reporter(name, sender, store)
        self._claiming = Claiming(policy, codec, store)
        self._endings = Endings(policy, codec, self.reporter)
        #: Gives a key back before its run ends.
        self.release = self._endings.release
        #: Returns a claim of a call's key that holds nothing.
        self.unguarded_claim = self._claiming.unguarded

    def execute(self, call: Call, body: Body) -> CallResult:
        """Claim the key and act on the answer.

        Raises:
            FingerprintMismatch: if the key belongs to a call with other arguments.
            BaseException: whatever ``body`` raised.
        """
        if self.policy.mode == "observe":
            return self._observe(call, body)
        looks, repeats, came = 0, 0, time.monotonic()
        wait_until = self._wait_until(call) if self.policy.on_conflict == "wait" else 0.0
        while True:
            attempt = os.urandom(ATTEMPT_BYTES)
            try:
                answered = self._claiming.claim(call, attempt)
            except STORE_ERRORS as error:
                self._report(signals.store_failed, call, error=error)
                return StoreFailed(error)
            match answered.answer:
                case Claimed(record):
                    result = self._act(call, record, answered, body, repeats)
                    if not isinstance(result, End):
                        return result
                    # Claim again: it is answered by the settled record or a newer claim, or runs the call again.
                    if result is End.ROLLED_BACK:
                        repeats += 1
                        backoff.pause(repeats, first=_FIRST_REPEAT)
                case Held(record, left_ms):
                    looks += 1
                    if not self._look_again(looks, wait_until, left_ms):
                        waited, store = time.monotonic() - came, answered.store
                        self._report(signals.conflicted, call, record, store=store, seconds=waited)
                        return Conflict(record, left_ms)
                case Settled(record, age_ms):
                    waited, store = time.monotonic() - came, answered.store
                    self._report(signals.replayed, call, record, store=store, seconds=waited)
                    return Replay(record, age_ms)
                case Mismatched(record):
                    took, store = time.monotonic() - came, answered.store
                    self._report(signals.mismatched, call, record, store=store, seconds=took)
                    message = _MISMATCH.format(call.identity, record.task_id)
                    raise errors.FingerprintMismatch(message)

    def _report(
        self,
        outcome: Signal,
        call: Call,
        record: Record | None = None,
        *,
        store: Store | None = None,
        **details: Unpack[Details],
    ) -> None:
        self.reporter.report(outcome, call.identity, call.task_id, record, store=store, **details)

    # -- when another holds the key ------------------------------------------------------------------------------------

    def _wait_until(self, call: Call) -> float:
        """Return until when a duplicate may hold its worker (``time.monotonic``)."""
        wait_ms, longest = self.policy.wait_ms, call.longest_wait_ms
        if longest is not None:
            wait_ms = min(wait_ms, longest)
        return time.monotonic() + wait_ms / 1000

    @staticmethod
    def _look_again(looks: int, until: float, left_ms: int) -> bool:
        """Wait for the holder a little; ``False`` if the time is up."""
        # Its lease may end before the next look would be due.
        longest = max(min(left_ms / 1000, _LONGEST_LOOK), 0.001)
        return backoff.pause(looks, until=until, first=_FIRST_LOOK, longest=longest)

    # -- without protection --------------------------------------------------------------------------------------------

    def _observe(self, call: Call, body: Body) -> Ran:
        """Run whatever the store says; record, count and log what would have been a duplicate."""
        try:
            answered = self._claiming.claim_once(call, os.urandom(ATTEMPT_BYTES))
        except STORE_ERRORS as error:
            self._report(signals.store_failed, call, error=error, observed=True)
            return Ran(self.unguarded(call, body))
        match answered.answer:
            case Claimed(record):
                ran = self._run(call, record, answered, body, 0)
                assert isinstance(ran, Ran), "observing, nothing is dropped"
                return ran
            case Held(record, _):
                outcome = signals.conflicted
            case Settled(record, _):
                outcome = signals.replayed
            case Mismatched(record):
                outcome = signals.mismatched
        self._report(outcome, call, record, observed=True)
        return Ran(self.unguarded(call, body))

    def unguarded(self, call: Call, body: Body) -> object:
        """Run without protection, with a current claim that holds nothing."""
        outer = claim_var.get()
        claim_var.set(self.unguarded_claim(call))
        try:
            return self._expecting_transaction(call, body)()
        finally:
            claim_var.set(outer)

    def _expecting_transaction(self, call: Call, body: Body) -> Body:
        """Return what runs the body of an atomic task without a claim: it still relies on a transaction around it."""
        if not self.policy.atomic:
            return body
        return partial(in_transaction, self._store(), call, self.name, body)

    # -- under a claim -------------------------------------------------------------------------------------------------

    def _act(
        self, call: Call, record: Record, answered: AnsweredAttempt, body: Body, repeats: int
    ) -> CallResult | End:
        """Run the body, or settle the key FAILED without a run; an :class:`End` if the call is to claim again.

        After a FAILED without a run the call finds that record, as a duplicate does: so an error is raised in one way.
        """
        barred = self._why_not_to_run(record)
        if barred is None:
            return self._run(call, record, answered, body, repeats)
        try:
            claim = self._claiming.make_claim(call, record, answered)
            self._endings.fail_without_run(call, claim, barred)
        except STORE_ERRORS as trouble:
            self._report(signals.store_failed, call, record, error=trouble)
            return StoreFailed(trouble, barred=True)  # its message comes back
        return End.SETTLED

    def _why_not_to_run(self, record: Record) -> errors.IdempotencyError | None:
        """Return why a key is settled FAILED instead of being run again (celery #9082), ``None`` if it may run."""
        if record.crashes and self.policy.on_stale == "fail":
            return errors.ProcessingTimedOut(
                f"{self.name} was not run again: the last run of {record.identity} did not come back, and "
                'idempotency_on_stale="fail" wants a person to look at it. Find out what it did, then complete '
                "the key, or forget it."
            )
        if record.crashes > self.policy.max_crashes:
            return errors.TooManyCrashes(
                f"{self.name} was not run again: {record.crashes} runs of {record.identity} ended in a crash of their "
                f"worker, more than idempotency_max_crashes ({self.policy.max_crashes}). Find the cause, then "
                "forget the key.",
                record.crashes,
            )
        return None

    def _run(
        self, call: Call, record: Record, answered: AnsweredAttempt, body: Body, repeats: int
    ) -> CallResult | End:
        """Run the body under the claim; an :class:`End` if the call is to claim again, as a duplicate does.

        After the body has returned, of an atomic task after its COMMIT, no exception releases the key, because the
        effect has happened (:class:`.BodyOutcome`)::

            body returns ─┬─ [SoftTimeLimitExceeded] ─▶ settle all the same, the task succeeds
                          └─ settle ─ [SystemExit] ───▶ settle once more, then leave it to the lease

        The first thing at the end is the claim's phase: whatever strikes after that, it is not the current claim any
        more, and the heartbeat drops it.
        """
        claim = self._claiming.make_claim(call, record, answered)
        run = self._in_transaction(call, claim, body, repeats)
        outcome, outer = BodyOutcome(run), claim_var.get()
        try:
            claim_var.set(claim)
            if not claim.store.joined():  # else no other thread could see it, or renew it
                heartbeat.add(claim)
            took, state = time.monotonic() - answered.sent, State.PROCESSING
            self.reporter.report(
                signals.claimed,
                call.identity,
                call.task_id,
                record,
                store=claim.store,
                state=state,
                seconds=took,
            )
            value = outcome.run()
            if self._refuses(value):
                raise unfinished.close(self.name, value)
            return self._returned(call, claim, value, None)
        except BaseException as error:
            if outcome.returned and not self._refuses(outcome.value):
                return self._returned(call, claim, outcome.value, error)
            if isinstance(run, AtomicRun):
                return run.undone(error)
            end = self._endings.end_failed(call, claim, error)
            if self._is_dropped(end):
                return end
            raise
        finally:
            if claim.phase in AT_WORK:
                claim.phase = Phase.ENDED
            claim_var.set(outer)
            heartbeat.remove(claim)

    def _in_transaction(
        self, call: Call, claim: Claim, body: Body, repeats: int
    ) -> Body | AtomicRun:
        """Return what runs the body: in a transaction with its record, where the policy wants that."""
        if self.policy.mode == "observe":
            return self._expecting_transaction(call, body)
        if not self.policy.atomic:
            return body
        endings, codec = self._endings, self._codec
        return AtomicRun(call, claim, body, codec=codec, endings=endings, repeats=repeats)

    def _refuses(self, value: object) -> bool:
        return unfinished.is_unfinished(value) and self.policy.mode != "observe"

    def _is_dropped(self, end: End) -> bool:
        return end is End.NEWER_CLAIM and self.policy.mode != "observe"

    def _returned(
        self, call: Call, claim: Claim, value: object, late: BaseException | None
    ) -> Ran | End:
        """Record that the body returned. ``late`` is an exception that came after that.

        ::

            late                           the settle is tried  and then
            None                           for a lease          the value is returned
            SoftTimeLimitExceeded          for a lease          the value is returned: the task succeeds
            SystemExit, KeyboardInterrupt  once                 it is raised: the process ends
        """
        at_exit = late is not None and not isinstance(late, Exception)
        if claim.phase in (Phase.RUNNING, Phase.LOST):
            dump = partial(self._codec.dump_value, value)
            settlement = Settlement(State.COMPLETED, dump, result=call.result)
            end = self._endings.settle(call, claim, settlement, at_exit=at_exit)
            if self._is_dropped(end) and not at_exit:
                return end
        if late is None:
            return Ran(value)
        if at_exit:
            raise late
        line = "idempotency: %s came after %s had returned (%s): its value is returned, and the task succeeds"
        logger.warning(line, type(late).__name__, self.name, call.identity)
        return Ran(value)
