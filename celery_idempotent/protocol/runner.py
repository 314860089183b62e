"""claim → run → settle | release | replay: the one place that spells the protocol out.

Knows the store and the policy, nothing of Celery: a caller (:mod:`.task`) hands in the call, its body and the codec of
its values, and gets one :data:`Result` back, or the exception that the body ended with::

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
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from celery_idempotent import signals
from celery_idempotent.errors import (
    FingerprintMismatch,
    IdempotencyError,
    ProcessingTimedOut,
    StoreUnavailable,
    TooManyCrashes,
)
from celery_idempotent.protocol import backoff, deferred, key_change, unfinished
from celery_idempotent.protocol.atomic import AtomicRun, Repeats, in_transaction
from celery_idempotent.protocol.calls import (
    STORE_ERRORS,
    Call,
    Codec,
    Conflict,
    Ran,
    Replay,
    Result,
    StoreFailed,
)
from celery_idempotent.protocol.claim import Claim, ObservedClaim, UnguardedClaim, running
from celery_idempotent.protocol.endings import Endings
from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.protocol.telling import Reporter
from celery_idempotent.records import (
    Answer,
    Claimed,
    ClaimRequest,
    Held,
    Identity,
    Mismatched,
    Record,
    Renewal,
    Settled,
    State,
)
from celery_idempotent.stores.base import ATTEMPT_BYTES, Store
from celery_idempotent.stores.memory import MemoryStore

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal

__all__ = ["Runner"]

logger = logging.getLogger(__name__)

#: How long a claim tries to reach the store before the message goes back, in seconds.
CLAIM_PATIENCE = 3.0

#: A duplicate that waits for the holder looks again after these times, in seconds.
_FIRST_LOOK, _LONGEST_LOOK = 0.02, 0.5


class _Asked(NamedTuple):
    """What a claim was answered, and when it was sent (``time.monotonic``).

    ``old``: the record of before a deploy that changed the key, which is claimed as well.
    """

    answer: Answer
    sent: float
    old: Record | None


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
        self._endings = Endings(policy, codec, self.reporter)
        #: Gives a key back before its run ends.
        self.release = self._endings.release

    def execute(self, call: Call, body: Callable[[], Any]) -> Result:
        """Claim the key and act on the answer.

        Raises:
            FingerprintMismatch: if the key belongs to a call with other arguments.
            BaseException: whatever ``body`` raised.
        """
        if call.around is not None:
            deferred.give_back()
        if self.policy.mode == "observe":
            return self._observe(call, body)
        waited, wait_until, repeats = 0, self._wait_until(call), Repeats()
        while True:
            attempt = os.urandom(ATTEMPT_BYTES)
            try:
                asked = self._claim(call, attempt)
            except STORE_ERRORS as error:
                self._report(signals.store_failed, call, error=error)
                return StoreFailed(error, attempt)
            match asked.answer:
                case Claimed(record):
                    verdict = self._verdict(record)
                    result = (
                        self._condemn(call, record, verdict, asked)
                        if verdict is not None
                        else self._run(call, record, body, asked, repeats)
                    )
                    if isinstance(result, StoreFailed):
                        return replace(result, attempt=attempt)
                    if result is not None:
                        return result
                    repeats.pause()
                case Held(record, left_ms):
                    if (ours := deferred.answer(record)) is not None:
                        self._report(signals.replayed, call, ours)
                        return Replay(ours, 0)
                    waited += 1
                    # Its lease may end before the next look would be due.
                    look_in = max(min(left_ms / 1000, _LONGEST_LOOK), 0.001)
                    if backoff.pause(waited, until=wait_until, first=_FIRST_LOOK, longest=look_in):
                        continue
                    self._report(signals.conflicted, call, record)
                    return Conflict(record, left_ms, other=key_change.is_other(call.before, record))
                case Settled(record, age_ms):
                    self._report(signals.replayed, call, record)
                    return Replay(record, age_ms)
                case Mismatched(record):
                    self._report(signals.mismatched, call, record)
                    raise FingerprintMismatch(
                        f"{call.identity} belongs to task {record.task_id}, which was called with other arguments: a "
                        "key stands for one intention. Use another key, or take what may differ out of "
                        "idempotency_fingerprint."
                    )

    def _report(
        self, outcome: Signal, call: Call, record: Record | None = None, **more: Any
    ) -> None:
        self.reporter.report(outcome, call.identity, call.task_id, record, **more)

    def _wait_until(self, call: Call) -> float:
        """Return until when a duplicate may hold its worker (``time.monotonic``)."""
        if self.policy.on_conflict != "wait":
            return 0.0
        wait_ms, longest = self.policy.wait_ms, call.longest_wait_ms
        if longest is not None:
            wait_ms = min(wait_ms, longest)
        return time.monotonic() + wait_ms / 1000

    def _observe(self, call: Call, body: Callable[[], Any]) -> Ran:
        """Run whatever the store says; record, count and log what would have been a duplicate."""
        try:
            asked = self._claim_once(call, os.urandom(ATTEMPT_BYTES))
        except STORE_ERRORS as error:
            self._report(signals.store_failed, call, error=error, observed=True)
            return Ran(self.unguarded(call, body))
        match asked.answer:
            case Claimed(record):
                ran = self._run(call, record, body, asked, Repeats())
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

    def unguarded(self, call: Call, body: Callable[[], Any]) -> Any:
        """Run without protection, with a current claim that holds nothing."""
        before = running.get()
        running.set(self.unguarded_claim(call))
        try:
            return self._expecting_transaction(call, body)()
        finally:
            running.set(before)

    def unguarded_claim(self, call: Call) -> Claim:
        """Return a claim of the call's key that holds nothing."""
        record = Record(
            identity=call.identity,
            state=State.PROCESSING,
            token=0,
            created_ms=0,
            updated_ms=0,
            fingerprint=call.fingerprint,
            task_id=call.task_id,
            worker=call.worker,
        )
        return UnguardedClaim(self._any_store(), record, self._lease(record), self._codec, sent=0)

    def _any_store(self) -> Store:
        """Return the store, or one that is of no use, where a claim holds nothing anyway."""
        try:
            return self._store()
        except STORE_ERRORS:
            return MemoryStore()

    def _claim(self, call: Call, attempt: bytes) -> _Asked:
        """Claim with bounded retries; repeating one attempt is safe when its answer was lost."""
        give_up = time.monotonic() + CLAIM_PATIENCE
        failures = 0
        try:
            while True:
                try:
                    return self._claim_once(call, attempt)
                except StoreUnavailable:  # noqa: PERF203  tries that are to be told apart
                    failures += 1
                    if not backoff.pause(failures, until=give_up):
                        raise
        except STORE_ERRORS:
            raise
        except BaseException:
            # A time limit or SIGTERM while the answer was on its way: the key may be ours already.
            self._abandon(call, attempt)
            raise

    def _claim_once(self, call: Call, attempt: bytes) -> _Asked:
        """Ask for the key, and for the one of before a deploy as well."""
        take = partial(self._take, call, attempt)
        answer, sent = take(
            call.identity, call.fingerprint, on_stale=self.policy.on_stale, message=call.message
        )
        before, old = call.before, None
        if before is not None:
            answer, old = key_change.claimed(
                answer,
                lambda: take(before.identity, before.fingerprint)[0],
                settle=self._settle_as,
                store=self._store(),
            )
        return _Asked(answer, sent, old)

    def _settle_as(self, record: Record, old: Record) -> None:
        """Let a claim end as the same operation did under its old identity."""
        completed = old.state is State.COMPLETED
        self._store().settle(
            record,
            state=State.COMPLETED if completed else State.FAILED,
            value=old.value,
            keep_ms=self.policy.settled_keep_ms if completed else self.policy.failed_keep_ms,
            replaced=old.replaced,
        )

    def _take(
        self, call: Call, attempt: bytes, identity: Identity, fingerprint: bytes | None, **how: Any
    ) -> tuple[Answer, float]:
        """Return the answer, and when it was asked for (``time.monotonic``)."""
        store = self._store()
        request = ClaimRequest(
            identity=identity,
            attempt=attempt,
            lease_ms=self.policy.lease_ms,
            keep_ms=self.policy.keep_ms,
            fingerprint=fingerprint,
            task_id=call.task_id,
            worker=call.worker,
            unanswered=call.unanswered,
            **how,
        )
        sent = time.monotonic()
        while isinstance(answer := store.claim(request), (Settled, Mismatched)):
            over = answer.record
            if over.task_id == call.task_id or not self.policy.forgets(over):
                break
            # A mark without retention answers redeliveries of its own message only.
            store.forget_mark(identity, token=over.token)
            sent = time.monotonic()
        return answer, sent

    def _abandon(self, call: Call, attempt: bytes) -> None:
        try:
            asked = self._claim_once(call, attempt)
            if isinstance(asked.answer, Claimed):
                record = asked.answer.record
                self._hold(record, asked.sent, asked.old).store.release(
                    call.identity, token=record.token
                )
        except STORE_ERRORS:
            pass  # the lease ends it

    def _verdict(self, record: Record) -> IdempotencyError | None:
        """Return why a key is settled FAILED instead of being run again (celery #9082), ``None`` if it may run."""
        if record.crashes and self.policy.on_stale == "fail":
            return ProcessingTimedOut(
                f"{self.name} was not run again: the last run of {record.identity} did not come back, and "
                'idempotency_on_stale="fail" wants a person to look at it. Find out what it did, then forget the key.'
            )
        if record.crashes > self.policy.max_crashes:
            return TooManyCrashes(
                f"{self.name} was not run again: {record.crashes} runs of {record.identity} ended in a crash of their "
                f"worker, more than idempotency_max_crashes ({self.policy.max_crashes}). Find the cause, then "
                "forget the key.",
                record.crashes,
            )
        return None

    def _condemn(
        self, call: Call, record: Record, error: IdempotencyError, asked: _Asked
    ) -> Result | None:
        """Settle the key FAILED without a run: then its record answers. The message comes back if that fails."""
        try:
            self._endings.condemn(call, self._hold(record, asked.sent, asked.old), error)
        except STORE_ERRORS as trouble:
            self._report(signals.store_failed, call, record, error=trouble)
            return StoreFailed(trouble, condemned=True)
        return None

    def _hold(self, record: Record, sent: float, old: Record | None = None) -> Claim:
        kind = ObservedClaim if self.policy.mode == "observe" else Claim
        store = self._store()
        if old is not None:
            store = key_change.both(store, old)
        claim = kind(store, record, self._lease(record), self._codec, sent=sent)
        claim.old = old
        return claim

    def _lease(self, record: Record) -> Renewal:
        return Renewal(
            identity=record.identity,
            token=record.token,
            lease_ms=self.policy.lease_ms,
            keep_ms=self.policy.keep_ms,
        )

    def _run(
        self,
        call: Call,
        record: Record,
        body: Callable[[], Any],
        asked: _Asked,
        repeats: Repeats,
    ) -> Result | None:
        """Run the body under the claim; ``None`` if that is gone, and the call claims anew, as a duplicate does.

        A time limit or SIGTERM is an exception raised at *any* bytecode, also right after the body returned and before
        its value is stored in a variable. ``defaultdict`` calls its factory and stores what it returned within one C
        function, where no signal handler runs: so ``outcome`` is filled exactly if the body returned. Once it is,
        nothing releases: the effect happened::

            body returns ─┬─ [signal: SoftTimeLimitExceeded] ─▶ settle again, the task succeeds
                          └─ settle ─ [signal: SystemExit] ───▶ settle once more, then leave it to the lease

        For the same reason a claim says itself that it is over: whatever is struck after that leaves nothing behind.
        """
        claim = self._hold(record, asked.sent, asked.old)
        atomic = None
        if self.policy.mode == "observe":
            body = self._expecting_transaction(call, body)
        elif self.policy.atomic:
            atomic = AtomicRun(
                call,
                claim,
                body,
                codec=self._codec,
                endings=self._endings,
                repeats=repeats,
            )
        outcome: defaultdict[None, Any] = defaultdict(atomic or body)
        before = running.get()
        try:
            running.set(claim)
            if (
                not claim.store.joined()
            ):  # else another thread could not renew it, and nobody see it
                heartbeat.add(claim)
            self._report(
                signals.claimed,
                call,
                record,
                store=claim.store if asked.old is None else None,
                state=State.PROCESSING,
            )
            if self._refuses(outcome[None]):
                raise unfinished.close(self.name, outcome.pop(None))
            return self._returned(call, claim, outcome, None)
        except BaseException as error:
            if None in outcome and not self._refuses(outcome[None]):
                return self._returned(call, claim, outcome, error)
            if atomic is not None:
                return atomic.undone(error)
            if self._endings.ended(call, claim, error):
                raise
            return None
        finally:
            claim.over = True
            running.set(before)
            heartbeat.remove(claim)

    def _expecting_transaction(self, call: Call, body: Callable[[], Any]) -> Callable[[], Any]:
        if not self.policy.atomic:
            return body
        return partial(in_transaction, self._store(), call, self.name, body)

    def _refuses(self, value: object) -> bool:
        return unfinished.is_unfinished(value) and self.policy.mode != "observe"

    def _returned(
        self,
        call: Call,
        claim: Claim,
        outcome: Mapping[None, Any],
        late: BaseException | None,
    ) -> Ran | None:
        """Record that the body returned; ``late`` is an exception that came after that."""
        value = outcome[None]
        if not claim.given_back:
            dump = partial(self._codec.dump_value, value)
            settled = self._endings.settle(call, claim, dump, State.COMPLETED, late)
            claim.over = True
            if not settled and (late is None or isinstance(late, Exception)):
                return None
        if late is None:
            return Ran(value)
        if not isinstance(late, Exception):
            raise late
        logger.warning(
            "idempotency: %s came after %s had returned: %s is completed, and the task succeeds",
            type(late).__name__,
            self.name,
            call.identity,
        )
        return Ran(value)
