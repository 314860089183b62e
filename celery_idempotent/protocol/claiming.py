"""Claims a key: asks the store, again while it is away, and makes a claim of its answer.

::

    claim() ─┬─ claim_once(): the identity, and the old one while keys change ─▶ AnsweredAttempt ─ make_claim() ─▶ Claim
             ├─ ✗ the store is away ───────▶ claim_once() again, with the same attempt
             └─ ✗ a signal handler raised ─▶ release what the store may have given us
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from celery_idempotent import backoff
from celery_idempotent.protocol.calls import STORE_ERRORS, Call, Codec
from celery_idempotent.protocol.claim import Claim, ObservedClaim, UnguardedClaim
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.records import (
    Answer,
    Claimed,
    ClaimRequest,
    Mismatched,
    Record,
    Renewal,
    Settled,
    State,
)
from celery_idempotent.stores.base import Store

#: How long a claim tries to reach the store before the message goes back, in seconds.
CLAIM_RETRY_SECONDS = 3.0


class AnsweredAttempt(NamedTuple):
    """An attempt to claim that the store has answered.

    ``sent`` is the time just before the request was sent (``time.monotonic``): the lease cannot have begun earlier.
    """

    answer: Answer
    sent: float
    store: Store


class Claiming:
    """Claims keys for one task under its policy."""

    def __init__(self, policy: Policy, codec: Codec, store: Callable[[], Store]) -> None:
        self._policy = policy
        self._codec = codec
        self._store = store
        self._keep_ms = policy.keep_ms

    def claim(self, call: Call, attempt: bytes) -> AnsweredAttempt:
        """Claim the key, and try again for a few seconds while the store is away.

        All tries have the same ``attempt``: if the answer to one of them was lost, the next one gets the same claim.

        Raises:
            StoreUnavailable, StoreMisconfigured: if no try had an answer.
        """
        until = time.monotonic() + CLAIM_RETRY_SECONDS
        try:
            return backoff.persist(partial(self.claim_once, call, attempt), until=until)
        except STORE_ERRORS:
            raise
        except BaseException:
            # A time limit or SIGTERM struck before the answer was here: the store may have given us the key.
            self._abandon(call, attempt)
            raise

    def claim_once(self, call: Call, attempt: bytes) -> AnsweredAttempt:
        """Claim the key of a call once."""
        store = self._store()
        request = ClaimRequest(
            identity=call.identity,
            fingerprint=call.fingerprint,
            task_id=call.task_id,
            worker=call.worker,
            message=call.message,
            attempt=attempt,
            lease_ms=self._policy.lease_ms,
            keep_ms=self._keep_ms,
            # A sweep leaves alone what is only observed.
            on_stale="interrupt" if self._policy.mode == "observe" else self._policy.on_stale,
        )
        sent = time.monotonic()
        while isinstance(answer := store.claim(request), (Settled, Mismatched)):
            record = answer.record
            if record.task_id == request.task_id or not self._policy.forgets(record):
                break
            # With a retention of 0 a settled record only answers redeliveries of its own message. This message is
            # another one: delete the record, and claim again.
            store.forget_mark(request.identity, token=record.token)
            sent = time.monotonic()
        return AnsweredAttempt(answer, sent, store)

    def _abandon(self, call: Call, attempt: bytes) -> None:
        """Release what an attempt without an answer may have claimed: repeat it, and learn the token of that claim."""
        try:
            answered = self.claim_once(call, attempt)
            if isinstance(answered.answer, Claimed):
                claim = self.make_claim(call, answered.answer.record, answered)
                claim.store.release(call.identity, token=claim.token)
        except STORE_ERRORS:
            pass  # if there is a claim, its lease ends it

    def make_claim(self, call: Call, record: Record, answered: AnsweredAttempt) -> Claim:
        """Make the claim of a run, for an attempt that was answered with :class:`Claimed`."""
        kind = ObservedClaim if self._policy.mode == "observe" else Claim
        claim = kind(answered.store, record, self._renewal(record), self._codec, sent=answered.sent)
        claim.requeues = record.reserved or call.message is not None
        return claim

    def unguarded(self, call: Call) -> Claim:
        """Make a claim that holds nothing, for a run without protection: ``self.idempotency.key`` works in its body."""
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
        try:
            store = self._store()
        except STORE_ERRORS:
            from celery_idempotent.stores.memory import MemoryStore

            store = MemoryStore()  # it is never asked: this claim neither renews nor records
        return UnguardedClaim(store, record, self._renewal(record), self._codec, sent=0)

    def _renewal(self, record: Record) -> Renewal:
        return Renewal(
            identity=record.identity,
            token=record.token,
            lease_ms=self._policy.lease_ms,
            keep_ms=self._keep_ms,
        )
