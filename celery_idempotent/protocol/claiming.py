"""Claiming a key: the store is asked, again while it is away, and its answer becomes a claim.

::

    ask() ─┬─ ask_once() ─ the identity, and the old one while keys change ─▶ AnsweredAttempt ─ hold() ─▶ Claim
           ├─ ✗ the store is away ───────▶ ask_once() again, with the same attempt
           └─ ✗ a signal handler raised ─▶ release what the store may have given us
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from celery_idempotent import backoff
from celery_idempotent.protocol import key_change
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
    SettleRequest,
    State,
)
from celery_idempotent.stores.base import Store

#: How long a claim tries to reach the store before the message goes back, in seconds.
CLAIM_RETRY_SECONDS = 3.0


class AnsweredAttempt(NamedTuple):
    """An attempt to claim that the store has answered.

    ``attempt`` is its random id (see :class:`~celery_idempotent.records.ClaimRequest`), ``sent`` the time before it was
    sent (``time.monotonic``): the lease cannot have begun earlier. ``before`` is the record under the identity that
    the call had before a deploy, if that was claimed as well.
    """

    answer: Answer
    attempt: bytes
    sent: float
    store: Store
    before: Record | None = None


class Claiming:
    """Claims keys for one task under its policy."""

    def __init__(self, policy: Policy, codec: Codec, store: Callable[[], Store]) -> None:
        self._policy = policy
        self._codec = codec
        self._store = store
        self._keep_ms = policy.keep_ms

    def ask(self, call: Call, attempt: bytes) -> AnsweredAttempt:
        """Claim, and try again for a few seconds while the store is away.

        All tries have the same ``attempt``: if the answer to one of them was lost, the next one gets the same claim.

        Raises:
            StoreUnavailable, StoreMisconfigured: if no try had an answer.
        """
        until = time.monotonic() + CLAIM_RETRY_SECONDS
        try:
            return backoff.persist(partial(self.ask_once, call, attempt), until=until)
        except STORE_ERRORS:
            raise
        except BaseException:
            # A time limit or SIGTERM struck before the answer was here: the store may have given us the key.
            self._abandon(call, attempt)
            raise

    def ask_once(self, call: Call, attempt: bytes) -> AnsweredAttempt:
        """Claim the identity of a call, and the one that it had before a deploy as well."""
        store = self._store()
        request = ClaimRequest(
            identity=call.identity,
            fingerprint=call.fingerprint,
            task_id=call.task_id,
            worker=call.worker,
            message=call.message,
            unanswered=call.unanswered,
            attempt=attempt,
            lease_ms=self._policy.lease_ms,
            keep_ms=self._keep_ms,
            on_stale=self._policy.on_stale,
        )
        answer, sent = self._claim(store, request)
        before, old = call.before, None
        if before is not None:
            # The record under the new identity stores the message, and says what becomes of a stale claim.
            old_request = replace(
                request,
                identity=before.identity,
                fingerprint=before.fingerprint,
                on_stale="interrupt",
                message=None,
            )
            answer, old = key_change.claim_both(
                answer,
                lambda: self._claim(store, old_request)[0],
                settle=self._settle_as,
                store=store,
            )
        return AnsweredAttempt(answer, attempt, sent, store, old)

    def _claim(self, store: Store, request: ClaimRequest) -> tuple[Answer, float]:
        """Claim one identity; return the answer, and when the request was sent (``time.monotonic``)."""
        sent = time.monotonic()
        while isinstance(answer := store.claim(request), (Settled, Mismatched)):
            record = answer.record
            if record.task_id == request.task_id or not self._policy.forgets(record):
                break
            # With a retention of 0 a settled record is a mark for redeliveries of its own message. This is another one.
            store.forget_mark(request.identity, token=record.token)
            sent = time.monotonic()
        return answer, sent

    def _settle_as(self, record: Record, old: Record) -> None:
        """Let a claim end as the same operation did under its old identity."""
        keep_ms = self._policy.keep_ms_of(old.state)
        self._store().settle(SettleRequest.ending_as(old, record=record, keep_ms=keep_ms))

    def _abandon(self, call: Call, attempt: bytes) -> None:
        """Release what an attempt without an answer may have claimed: asked again, the store tells its token."""
        try:
            asked = self.ask_once(call, attempt)
            if isinstance(asked.answer, Claimed):
                record = asked.answer.record
                self.hold(record, asked).store.release(call.identity, token=record.token)
        except STORE_ERRORS:
            pass  # if there is a claim, its lease ends it

    def hold(self, record: Record, asked: AnsweredAttempt) -> Claim:
        """Make the claim of a run, for an attempt that was answered with :class:`Claimed`."""
        kind = ObservedClaim if self._policy.mode == "observe" else Claim
        store, before = asked.store, asked.before
        if before is not None:
            store = key_change.both(store, before)
        claim = kind(store, record, self._renewal(record), self._codec, sent=asked.sent)
        if before is not None:
            claim.before = before
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
