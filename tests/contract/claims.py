"""The contract of `claim`: who gets a key, and with which token."""

from __future__ import annotations

import pytest

from celery_idempotent.records import Claimed, EndState, Held, Mismatched, Settled, State
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    FINGERPRINT,
    KEY,
    OTHER_FINGERPRINT,
    STATES,
    VALUE,
    Advance,
    ContractBase,
    all_at_once,
    attempt,
)


class ClaimContract(ContractBase):
    """Claims."""

    def test_a_claim_needs_neither_fingerprint_nor_owner(self, store: Store) -> None:
        """Fingerprints may be switched off, and programs other than Celery's workers may claim."""
        record = self.claim(store, fingerprint=None, task_id="", worker="")
        assert (record.fingerprint, record.task_id, record.worker) == (None, "", "")
        assert store.get(KEY) == record

    def test_a_token_is_at_least_the_time_in_microseconds(self, store: Store) -> None:
        """So tokens grow also over a store that has lost all its data: the clock has gone on."""
        record = self.claim(store)
        assert record.token >= record.created_ms * 1000

    def test_held_says_how_long_the_lease_still_lasts(self, store: Store, advance: Advance) -> None:
        """The duplicate comes back after that time: too short costs round trips, too long a wait."""
        self.claim(store)
        advance(self.lease_ms / 2)
        answer = self.try_claim(store)
        assert isinstance(answer, Held)
        assert 0 < answer.left_ms <= self.lease_ms / 2

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
