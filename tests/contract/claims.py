"""The contract of `claim`: who gets a key, and with which token."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import Claimed, EndState, Held, Mismatched, Settled, State
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    FINGERPRINT,
    KEY,
    MESSAGE,
    OTHER_FINGERPRINT,
    STATES,
    TASK_ID,
    VALUE,
    Advance,
    ContractBase,
    all_at_once,
    attempt,
)


class ClaimContract(ContractBase):
    """Claims."""

    def test_an_unclaimed_key_is_claimed(self, store: Store) -> None:
        answer = self.try_claim(store)
        assert isinstance(answer, Claimed)
        record = answer.record
        assert (record.identity, record.state) == (KEY, State.PROCESSING)
        assert (record.crashes, record.attempts) == (0, 1)
        assert record.fingerprint == FINGERPRINT
        assert record.owner == f"{TASK_ID}@web-1:4711"
        assert record.updated_ms == record.created_ms
        assert record.deadline_ms == record.created_ms + self.lease_ms
        assert (record.value, record.replaced) == (None, False)
        assert store.get(KEY) == record

    def test_a_claim_needs_neither_fingerprint_nor_owner(self, store: Store) -> None:
        """Fingerprints may be switched off, and programs other than Celery's workers may claim."""
        record = self.claim(store, fingerprint=None, task_id="", worker="")
        assert (record.fingerprint, record.task_id, record.worker) == (None, "", "")
        assert store.get(KEY) == record

    @pytest.mark.parametrize("on_stale", ["interrupt", "fail", "requeue"])
    @pytest.mark.parametrize("message", [None, b"", MESSAGE, b"x" * 100_000])
    def test_a_claim_keeps_what_to_do_when_it_is_stale(
        self, store: Store, on_stale: str, message: bytes | None
    ) -> None:
        """The worker that would know is gone by then: the record alone tells a sweep what to do, and has the message to
        send.
        """
        first = self.claim(store, on_stale=on_stale, message=message)
        assert (first.on_stale, first.message) == (on_stale, message)
        assert store.get(KEY) == first
        assert self.renew(store, first)
        swept = store.interrupt(KEY, token=first.token)
        assert swept is not None
        assert (swept.on_stale, swept.message) == (on_stale, message)

    @pytest.mark.parametrize("message", [None, b"another"])
    def test_a_new_claim_says_anew_what_to_do_when_it_is_stale(
        self, store: Store, message: bytes | None
    ) -> None:
        """A deploy between the two runs may have changed the task's options, and the second message is another one."""
        first = self.claim(store, on_stale="requeue", message=MESSAGE)
        store.interrupt(KEY, token=first.token)
        second = self.claim(store, on_stale="fail", message=message)
        assert (second.on_stale, second.message) == ("fail", message)
        assert store.get(KEY) == second

    def test_a_token_is_at_least_the_time_in_microseconds(self, store: Store) -> None:
        """So tokens grow also over a store that has lost all its data: the clock has gone on."""
        record = self.claim(store)
        assert record.token >= record.created_ms * 1000

    def test_a_claimed_key_is_held_for_everybody_else(self, store: Store) -> None:
        record = self.claim(store)
        answer = self.try_claim(store, task_id="another", worker="web-2:1")
        assert isinstance(answer, Held)
        assert answer.record == record == store.get(KEY)
        assert 0 < answer.left_ms <= self.lease_ms

    def test_held_says_how_long_the_lease_still_lasts(self, store: Store, advance: Advance) -> None:
        """The duplicate comes back after that time: too short costs round trips, too long a wait."""
        self.claim(store)
        advance(self.lease_ms / 2)
        answer = self.try_claim(store)
        assert isinstance(answer, Held)
        assert 0 < answer.left_ms <= self.lease_ms / 2

    def test_a_claim_whose_answer_was_lost_gets_the_same_token_again(
        self, store: Store, advance: Advance
    ) -> None:
        """The client cannot know whether its claim arrived. It asks again, and must not find itself in its own way.

        ::

            worker   claim (attempt a) ─▶ written ─✂─ no answer     claim (attempt a) ─▶ Claimed, the same token
        """
        mine = attempt()
        first = self.claim(store, attempt=mine)
        advance(self.lease_ms / 2)
        again = self.claim(store, attempt=mine)
        assert again.deadline_ms is not None
        assert first.deadline_ms is not None
        assert again.deadline_ms > first.deadline_ms
        assert dataclasses.replace(again, deadline_ms=first.deadline_ms) == first

    def test_a_claim_repeated_late_is_no_crash(self, store: Store, advance: Advance) -> None:
        """Nobody crashed: the first claim never came to a run, its answer was lost."""
        mine = attempt()
        first = self.claim(store, attempt=mine)
        advance(self.lease_ms + 1)
        again = self.claim(store, attempt=mine)
        assert (again.token, again.crashes, again.attempts) == (first.token, 0, 1)

    def test_a_claim_repeated_after_its_interruption_is_a_new_one(self, store: Store) -> None:
        """A sweep has counted the crash already, and may have told people. The run that begins now is another one."""
        mine = attempt()
        first = self.claim(store, attempt=mine)
        store.interrupt(KEY, token=first.token)
        again = self.claim(store, attempt=mine)
        assert again.token > first.token
        assert (again.crashes, again.attempts) == (1, 2)

    def test_a_lease_that_ran_out_is_claimed_and_counts_a_crash(
        self, store: Store, advance: Advance
    ) -> None:
        """No sweep is needed for that: whoever comes first after the lease, a sweep or a claim, counts the crash."""
        first = self.claim(store)
        advance(self.lease_ms + 1)
        second = self.claim(store, task_id="another", worker="web-2:1")
        assert second.token > first.token
        assert (second.crashes, second.attempts) == (1, 2)
        assert second.created_ms == first.created_ms
        assert second.updated_ms > first.updated_ms
        assert second.owner == "another@web-2:1"
        assert second.deadline_ms == second.updated_ms + self.lease_ms

    def test_every_crash_counts(self, store: Store, advance: Advance) -> None:
        """A message that kills each worker that runs it is stopped by this count (``idempotency_max_crashes``)."""
        self.claim(store)
        for crashes in (1, 2, 3):
            advance(self.lease_ms + 1)
            assert self.claim(store).crashes == crashes

    def test_an_interrupted_key_is_claimed_with_the_crash_it_had(self, store: Store) -> None:
        """The sweep counted this crash. Counted twice, a key would reach ``idempotency_max_crashes`` after half of
        them.
        """
        first = self.claim(store)
        store.interrupt(KEY, token=first.token)
        second = self.claim(store)
        assert second.state is State.PROCESSING
        assert second.token > first.token
        assert (second.crashes, second.attempts) == (1, 2)
        assert second.created_ms == first.created_ms

    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_a_settled_key_answers_with_its_record(
        self, store: Store, advance: Advance, state: EndState
    ) -> None:
        mine = attempt()
        assert self.settle(store, self.claim(store, attempt=mine), state)
        advance(self.lease_ms / 2)
        for asked in (mine, attempt()):
            answer = self.try_claim(store, attempt=asked)
            assert isinstance(answer, Settled)
            assert (answer.record.state, answer.record.value) == (state, VALUE)
            assert answer.age_ms >= self.lease_ms // 2
            assert answer.record == store.get(KEY)

    @pytest.mark.parametrize("state", STATES)
    def test_another_fingerprint_is_a_mismatch_and_changes_nothing(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """The same attempt with other arguments is a mismatch, too: no claim may be repeated for another call."""
        mine = attempt()
        record = self.bring_to(store, advance, state, attempt=mine)
        for asked in (mine, attempt()):
            answer = self.try_claim(store, attempt=asked, fingerprint=OTHER_FINGERPRINT)
            assert answer == Mismatched(record)
        assert store.get(KEY) == record

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize(("known", "asked"), [(None, FINGERPRINT), (FINGERPRINT, None)])
    def test_a_fingerprint_that_either_side_lacks_is_equal_to_any(
        self,
        store: Store,
        advance: Advance,
        state: str,
        known: bytes | None,
        asked: bytes | None,
    ) -> None:
        """A deploy may switch fingerprints on or off while older records and messages are still there."""
        self.bring_to(store, advance, state, fingerprint=known)
        answer = self.try_claim(store, fingerprint=asked)
        assert not isinstance(answer, Mismatched)
        if isinstance(answer, Claimed):
            assert answer.record.fingerprint == FINGERPRINT

    def test_tokens_grow_with_every_claim(self, store: Store, advance: Advance) -> None:
        """Outside systems refuse a token that is older than one they have seen (fencing). A token that is given twice,
        or that shrinks after the record was deleted, would let a late worker through, or keep the right one out.
        """
        record = self.claim(store)
        tokens = [record.token]
        for end in ("release", "forget", "stale", "interrupt", "expire", "settle"):
            if end == "release":
                assert store.release(KEY, token=record.token)
            elif end == "forget":
                assert store.forget(KEY)
            elif end == "stale":
                advance(self.lease_ms + 1)
            elif end == "interrupt":
                assert store.interrupt(KEY, token=record.token)
            elif end == "expire":
                advance(self.lease_ms + self.keep_ms + 1)
            else:
                assert self.settle(store, record)
                advance(self.keep_ms + 1)
            record = self.claim(store)
            tokens.append(record.token)
        assert tokens == sorted(set(tokens))

    def test_tokens_grow_within_one_microsecond_too(self, store: Store) -> None:
        """The time alone is no token: two claims may come within one tick of the clock."""
        tokens = []
        for _ in range(50):
            record = self.claim(store)
            tokens.append(record.token)
            store.release(KEY, token=record.token)
        assert tokens == sorted(set(tokens))

    @pytest.mark.parametrize("end", ["release", "forget"])
    def test_tokens_grow_though_the_clock_steps_back(
        self, store: Store, set_back: Advance, end: str
    ) -> None:
        """Clocks are corrected, and a replica that takes over has another clock. The last token must outlive its
        record.
        """
        tokens = []
        for _ in range(3):
            record = self.claim(store)
            tokens.append(record.token)
            assert store.release(KEY, token=record.token) if end == "release" else store.forget(KEY)
            if len(tokens) == 1:
                set_back(3_600_000)
        assert tokens == sorted(set(tokens))

    @pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
    def test_tokens_grow_after_a_late_settle_brought_back_an_older_one(
        self, store: Store, set_back: Advance, state: str
    ) -> None:
        """A claim that was given back settles after a newer one was given back as well."""
        late = self.claim(store)
        assert store.release(KEY, token=late.token)
        newer = self.claim(store)
        assert store.release(KEY, token=newer.token)
        assert self.settle(store, late, State[state])  # type: ignore[arg-type]
        assert store.forget(KEY)
        set_back(3_600_000)
        assert self.claim(store).token > newer.token

    def test_a_claimed_record_outlives_its_lease_and_then_goes(
        self, store: Store, advance: Advance
    ) -> None:
        """It stays for a while, so that a sweep finds it and a crash is counted; not for ever, for there may be no
        sweep.
        """
        self.claim(store)
        advance(self.lease_ms + self.keep_ms / 2)
        assert store.get(KEY) is not None
        advance(self.keep_ms / 2 + 1)
        assert store.get(KEY) is None
        assert (record := self.claim(store)).crashes == 0
        assert record.attempts == 1

    def test_of_many_at_once_one_wins(self, store: Store) -> None:
        """The reason for all of this: look and write are one step, or two workers find the key free at once."""
        answers = all_at_once(self.many, lambda _: self.try_claim(store))
        (winner,) = [answer for answer in answers if isinstance(answer, Claimed)]
        held = [answer for answer in answers if isinstance(answer, Held)]
        assert len(held) == self.many - 1
        assert {answer.record.token for answer in held} == {winner.record.token}

    def test_of_many_at_once_one_takes_over_a_stale_claim(
        self, store: Store, advance: Advance
    ) -> None:
        """After a machine is lost, all its keys become stale at once, and its messages come back to many workers at
        once.
        """
        self.claim(store)
        advance(self.lease_ms + 1)
        answers = all_at_once(self.many, lambda _: self.try_claim(store))
        (winner,) = [answer for answer in answers if isinstance(answer, Claimed)]
        assert winner.record.crashes == 1
