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
import random
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from celery_idempotent import signals
from celery_idempotent.claim import Claim, StepCodec, UnguardedClaim, running
from celery_idempotent.errors import (
    FingerprintMismatch,
    StoreMisconfigured,
    StoreUnavailable,
    TooManyCrashes,
)
from celery_idempotent.lease import heartbeat
from celery_idempotent.policy import Policy
from celery_idempotent.records import (
    Answer,
    Claimed,
    Held,
    Identity,
    Lease,
    Mismatched,
    Record,
    Settled,
    State,
    Stored,
)
from celery_idempotent.signals import Event, emit
from celery_idempotent.stores.base import ATTEMPT_BYTES, Store

if TYPE_CHECKING:
    from celery.utils.dispatch import Signal

__all__ = ["Call", "Codec", "Conflict", "Ran", "Replay", "Result", "Runner", "StoreFailed"]

logger = logging.getLogger(__name__)

_STORE_ERRORS = (StoreUnavailable, StoreMisconfigured)

#: How long a claim tries to reach the store before the message goes back, and a release before it is left to the lease.
CLAIM_PATIENCE = 3.0
RELEASE_PATIENCE = 1.0

#: So many failures to serialize a result (a time limit may be one) are worth another try.
MAX_FAULTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One delivery of one call: what it is about, and who works on it.

    ``may_wait``: the policy ``"wait"`` may hold its worker. ``on_settled`` is told the token of a settle by this call.
    ``message`` is what a sweep publishes should the claim go stale.
    """

    identity: Identity
    fingerprint: bytes | None
    task_id: str
    worker: str
    may_wait: bool = True
    on_settled: Callable[[int], None] | None = None
    message: bytes | None = None


class Codec(StepCodec, Protocol):
    """How values and exceptions are stored; ``None`` means: settle without it."""

    def dump_value(self, value: Any) -> Stored | None:
        """Serialize a result."""
        ...

    def dump_error(self, error: BaseException) -> Stored | None:
        """Serialize an exception."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """The body ran, and its result is recorded (or could not be: then somebody was told)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Replay:
    """The record answers; it was settled ``age_ms`` ago."""

    record: Record
    age_ms: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Somebody else is at it, for ``left_ms`` more unless the lease is renewed."""

    record: Record
    left_ms: int


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store could not be asked, or cannot be used: nothing ran."""

    error: StoreUnavailable | StoreMisconfigured


class _Patience:
    """How long a duplicate may hold its worker, and how often it asks meanwhile."""

    def __init__(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds
        self._pause = 0.02

    def wait(self, left: float) -> bool:
        """Pause until it is worth asking again; ``False`` if there is no patience left."""
        remaining = self._until - time.monotonic()
        if remaining <= 0:
            return False
        time.sleep(max(min(self._pause, remaining, left), 0.001))
        self._pause = min(self._pause * 1.5, 0.5)
        return True


Result = Ran | Replay | Conflict | StoreFailed


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
        self._sender = sender

    def execute(self, call: Call, body: Callable[[], Any]) -> Result:
        """Claim the key and act on the answer.

        Raises:
            FingerprintMismatch: if the key belongs to a call with other arguments.
            BaseException: whatever ``body`` raised.
        """
        if self.policy.mode == "observe":
            return self._observe(call, body)
        patience = _Patience(self.policy.wait_ms / 1000) if self._waits(call) else None
        while True:
            try:
                answer = self._claim(call)
            except _STORE_ERRORS as error:
                emit(signals.store_failed, self._sender(), self._event(call, None, error))
                return StoreFailed(error)
            match answer:
                case Claimed(record):
                    if record.crashes > self.policy.max_crashes:
                        self._condemn(call, record)
                        continue  # the record answers now
                    result = self._run(call, record, body)
                    if result is not None:
                        return result
                case Held(record, left_ms):
                    if patience is not None and patience.wait(left_ms / 1000):
                        continue
                    self._emit(signals.conflicted, call, record)
                    return Conflict(record, left_ms)
                case Settled(record, age_ms):
                    self._emit(signals.replayed, call, record)
                    return Replay(record, age_ms)
                case Mismatched(record):
                    self._emit(signals.mismatched, call, record)
                    raise FingerprintMismatch(
                        f"{call.identity} belongs to task {record.task_id}, which was called with other arguments: a "
                        "key stands for one intention. Use another key, or take what may differ out of "
                        "idempotency_fingerprint."
                    )

    def _waits(self, call: Call) -> bool:
        return self.policy.on_conflict == "wait" and call.may_wait

    def _observe(self, call: Call, body: Callable[[], Any]) -> Ran:
        """Run whatever the store says; record, count and log what would have been a duplicate."""
        try:
            answer = self._claim_once(call, os.urandom(ATTEMPT_BYTES))
        except _STORE_ERRORS as error:
            logger.warning("idempotency: observing nothing, the store failed: %s", error)
            return Ran(self.unguarded(call, body))
        match answer:
            case Claimed(record):
                ran = self._run(call, record, body)
                assert ran is not None, "observing, nothing is dropped"
                return ran
            case Held(record, _):
                signal, word = signals.conflicted, "waited for"
            case Settled(record, _):
                signal, word = signals.replayed, "been answered by"
            case Mismatched(record):
                signal, word = signals.mismatched, "been refused because of"
        logger.warning(
            "idempotency: observed: task %s (%s) runs, and would have %s task %s, which claimed %s at %s and is %s",
            call.task_id,
            self.name,
            word,
            record.owner,
            call.identity,
            record.created_at.isoformat(timespec="milliseconds"),
            record.state.value,
        )
        emit(signal, self._sender(), replace(self._event(call, record), observed=True))
        return Ran(self.unguarded(call, body))

    def unguarded(self, call: Call, body: Callable[[], Any]) -> Any:
        """Run without protection, with a current claim that holds nothing."""
        before = running.get()
        running.set(self.unguarded_claim(call))
        try:
            return body()
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
        return UnguardedClaim(self._store(), record, self._lease(record), self._codec)

    def _claim(self, call: Call) -> Answer:
        """Claim with bounded retries; repeating one attempt is safe when its answer was lost."""
        attempt = os.urandom(ATTEMPT_BYTES)
        give_up = time.monotonic() + CLAIM_PATIENCE
        delay = 0.0
        while True:
            try:
                if delay:
                    time.sleep(delay * random.uniform(0.5, 1))
                return self._claim_once(call, attempt)
            except StoreUnavailable:  # noqa: PERF203  tries that are to be told apart
                delay = delay * 2 or 0.05
                if time.monotonic() + delay > give_up:
                    raise
            except StoreMisconfigured:
                raise
            except BaseException:
                # A time limit or SIGTERM while the answer was on its way: the key may be ours already.
                self._abandon(call, attempt)
                raise

    def _claim_once(self, call: Call, attempt: bytes) -> Answer:
        return self._store().claim(
            call.identity,
            attempt=attempt,
            lease_ms=self.policy.lease_ms,
            keep_ms=self.policy.keep_ms,
            fingerprint=call.fingerprint,
            task_id=call.task_id,
            worker=call.worker,
            on_stale=self.policy.on_stale,
            message=call.message,
        )

    def _abandon(self, call: Call, attempt: bytes) -> None:
        try:
            match self._claim_once(call, attempt):
                case Claimed(record):
                    self._store().release(call.identity, token=record.token)
        except _STORE_ERRORS:
            pass  # the lease ends it

    def _condemn(self, call: Call, record: Record) -> None:
        """Settle a key that keeps taking its workers down as FAILED, instead of running it again (celery #9082)."""
        error = TooManyCrashes(
            f"{self.name} was not run again: {record.crashes} runs of {call.identity} ended in a crash of their "
            f"worker, more than idempotency_max_crashes ({self.policy.max_crashes}). Find the cause, then "
            "forget the key.",
            record.crashes,
        )
        claim = self._hold(record)
        logger.error("idempotency: %s", error)
        self._settle(call, claim, lambda: self._codec.dump_error(error), State.FAILED)

    def _hold(self, record: Record) -> Claim:
        return Claim(self._store(), record, self._lease(record), self._codec)

    def _lease(self, record: Record) -> Lease:
        return Lease(
            identity=record.identity,
            token=record.token,
            lease_ms=self.policy.lease_ms,
            keep_ms=self.policy.keep_ms,
        )

    def _run(self, call: Call, record: Record, body: Callable[[], Any]) -> Ran | None:
        """Run the body under the claim; ``None`` if the claim was lost and the call goes on as a duplicate.

        A time limit or SIGTERM is an exception raised at *any* bytecode, also right after the body returned and before
        its value is stored in a variable. ``defaultdict`` calls its factory and stores what it returned within one C
        function, where no signal handler runs: so ``outcome`` is filled exactly if the body returned. Once it is,
        nothing releases: the effect happened::

            body returns ─┬─ [signal: SoftTimeLimitExceeded] ─▶ settle again, the task succeeds
                          └─ settle ─ [signal: SystemExit] ───▶ settle once more, then leave it to the lease

        For the same reason a claim says itself that it is over: whatever is struck after that leaves nothing behind.
        """
        claim = self._hold(record)
        outcome: defaultdict[None, Any] = defaultdict(body)
        before = running.get()
        try:
            running.set(claim)
            heartbeat.add(claim)
            self._emit(signals.claimed, call, record)
            outcome[None]
            return self._returned(call, claim, outcome, None)
        except BaseException as error:
            if None in outcome:
                return self._returned(call, claim, outcome, error)
            if self._ended(call, claim, error):
                raise
            return None
        finally:
            claim.over = True
            running.set(before)
            heartbeat.remove(claim)

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
            settled = self._settle(call, claim, dump, State.COMPLETED, late)
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

    def _ended(self, call: Call, claim: Claim, error: BaseException) -> bool:
        """Record that the body raised ``error``; ``False`` if a newer claim makes it nobody's business."""
        if claim.given_back:
            return True
        if claim.replaced:
            return self._settle(call, claim, lambda: None, State.COMPLETED)
        if isinstance(error, self.policy.permanent_errors):
            return self._settle(call, claim, lambda: self._codec.dump_error(error), State.FAILED)
        self.release(claim, patient=isinstance(error, Exception))
        return True

    def release(self, claim: Claim, *, patient: bool = True, requeue_ms: int | None = None) -> None:
        """Give the key back, or leave it to its lease if the store does not answer in time.

        Not ``patient``: the process is being ended, and has 0.1 s left (CELERY: a hard limit kills after SIGTERM).
        """
        claim.given_back = True
        identity = claim.record.identity
        give_up = time.monotonic() + (RELEASE_PATIENCE if patient else 0)
        delay = 0.0
        while True:
            try:
                if delay:
                    time.sleep(delay)
                claim.store.release(identity, token=claim.token, requeue_ms=requeue_ms)
                break
            except _STORE_ERRORS as error:
                delay = delay * 2 or 0.05
                if time.monotonic() + delay > give_up:
                    logger.warning(
                        "idempotency: could not release %s, its lease will end it: %s",
                        identity,
                        error,
                    )
                    return
            except BaseException:
                with suppress(Exception):
                    claim.store.release(identity, token=claim.token, requeue_ms=requeue_ms)
                raise
        self._emit(signals.released, claim.record, claim.record)

    def _settle(
        self,
        call: Call,
        claim: Claim,
        dump: Callable[[], Stored | None],
        state: Literal[State.COMPLETED, State.FAILED],
        late: BaseException | None = None,
    ) -> bool:
        """Write the end state, again and again for at least one lease; ``False`` only if another token has the key.

        An exception that a signal handler raises in here does not end it: one that ends the process (``late`` or here)
        leaves it one last try.
        """
        give_up = time.monotonic() + self.policy.lease_ms / 1000
        delay, faults = 0.0, 0
        while not claim.settled:
            try:
                if delay:
                    time.sleep(delay * random.uniform(0.5, 1))
                # A value that makes the codec fail again and again is settled without it.
                value = dump() if faults < MAX_FAULTS else None
                return self._settle_once(call, claim, value, state)
            except Exception as failure:  # noqa: BLE001  the store's, a time limit's, or a fault of ours
                error = failure
                faults += not isinstance(failure, _STORE_ERRORS)
            except BaseException:
                with suppress(Exception):
                    self._settle_once(call, claim, dump(), state)
                raise
            if self.policy.mode == "observe":
                logger.warning(
                    "idempotency: observing: could not settle %s: %s", call.identity, error
                )
                return True
            delay = min(delay * 2 or 0.05, 5.0)
            ending = late is not None and not isinstance(late, Exception)
            if ending or time.monotonic() + delay > give_up:
                return self._settle_failed(call, claim, error)
        return True

    def _settle_once(
        self,
        call: Call,
        claim: Claim,
        value: Stored | None,
        state: Literal[State.COMPLETED, State.FAILED],
    ) -> bool:
        policy = self.policy
        done = claim.store.settle(
            claim.record,
            state=state,
            value=value,
            keep_ms=policy.settled_keep_ms if state is State.COMPLETED else policy.failed_keep_ms,
            replaced=claim.replaced,
        )
        claim.settled = done
        self._emit(signals.settled if done else signals.lease_lost, call, claim.record)
        if done and call.on_settled is not None:
            call.on_settled(claim.token)
        if not done:
            logger.warning(
                "idempotency: %s was claimed anew while task %s (token %d) ran: its result is dropped",
                call.identity,
                call.task_id,
                claim.token,
            )
        return done or policy.mode == "observe"

    def _settle_failed(self, call: Call, claim: Claim, error: BaseException) -> bool:
        """The effect happened and cannot be recorded: say so as loudly as a library may."""
        logger.critical(
            "idempotency: task %s of %s took effect, but its end could not be recorded within a lease (%s): after the "
            "lease a duplicate runs again",
            call.task_id,
            call.identity,
            error,
        )
        emit(signals.settle_failed, self._sender(), self._event(call, claim.record, error))
        return True

    def _emit(self, signal: Signal, call: Call | Record, record: Record | None) -> None:
        if signal.receivers:
            emit(signal, self._sender(), self._event(call, record))

    def _event(
        self, call: Call | Record, record: Record | None, error: BaseException | None = None
    ) -> Event:
        return Event(
            task=self.name,
            task_id=call.task_id,
            identity=call.identity,
            record=record,
            error=error,
        )
