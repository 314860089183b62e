"""The contract of `claim` and `reserve`: who gets a key, with which token, and who publishes."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import (
    Claimed,
    EndState,
    Held,
    Identity,
    Reserved,
    Settled,
    State,
)
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    KEY,
    MESSAGE,
    NAMES,
    TASK_ID,
    VALUE,
    Advance,
    ContractBase,
    all_at_once,
    attempt,
    crowd,
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

    @pytest.mark.parametrize("stale", [False, True])
    def test_of_many_at_once_one_wins(self, store: Store, advance: Advance, stale: bool) -> None:
        """The reason for all of this: look and write are one step, or two workers find the key free at once. After a
        machine is lost, all its messages come back to many workers at once.
        """
        if stale:
            self.claim(store)
            advance(self.lease_ms + 1)
        answers = all_at_once(self.many, lambda _: self.try_claim(store))
        (winner,) = [answer for answer in answers if isinstance(answer, Claimed)]
        held = [answer for answer in answers if isinstance(answer, Held)]
        assert len(held) == self.many - 1
        assert {answer.record.token for answer in held} == {winner.record.token}
        assert winner.record.crashes == stale

    def test_it_says_whether_its_transaction_may_be_rolled_back(self, store: Store) -> None:
        """A request that meets an uncommitted reservation waits for its COMMIT instead of promising that the task will
        run.
        """
        for uncommitted in (True, False, True):
            record = self.reserve(store, uncommitted=uncommitted)
            assert record.uncommitted is uncommitted
            assert self.found(store) == record
        assert self.claim(store).uncommitted is False

    def test_of_many_reservations_at_once_one_wins(self, store: Store, advance: Advance) -> None:
        """All publishers send under the task id that won, so that a second copy is a redelivery of the first."""
        with crowd(self.many) as together:
            for turn in ("first", "second"):

                def do(n: int, turn: str = turn) -> object:
                    return self.try_reserve(store, task_id=f"{turn} {n}")

                answers = together(do)
                (winner,) = [answer for answer in answers if isinstance(answer, Reserved)]
                held = [answer for answer in answers if isinstance(answer, Held)]
                assert len(held) == self.many - 1
                assert {answer.record.token for answer in held} == {winner.record.token}
                advance(self.lease_ms + 1)

    def test_of_a_reservation_and_a_claim_at_once_the_claim_holds(self, store: Store) -> None:
        """A publisher reserves for a message while another message of the same key begins to run. The reservation must
        not overwrite the claim, and comes out as Reserved only if it was first.
        """
        with crowd(2) as together:
            for name in NAMES[:20]:

                def do(who: int, name: Identity = name) -> object:
                    return (self.try_claim, self.try_reserve)[who](store, name)

                claimed, reserved = together(do)
                assert isinstance(claimed, Claimed)
                assert isinstance(reserved, (Reserved, Held))
                assert store.get(name) == claimed.record

    def test_the_message_of_a_reservation_is_requeued_past_its_deadline_until_it_is_claimed(
        self, store: Store, advance: Advance
    ) -> None:
        """The broker may never have got it; once a worker has claimed the key, it has.

        ::

            publisher   reserve, with its message ─ ✗ killed before it was sent
            sweep                                      the deadline passes ─ sends it ─ … twice as long ─ sends it again
            worker                                                                             claim: no more copies
        """
        record = self.reserve(store, message=MESSAGE)
        assert record.message == MESSAGE
        assert store.get(KEY) == record
        assert store.sweep(limit=10, requeue_ms=self.lease_ms).requeued == ()
        assert isinstance(self.try_reserve(store, task_id="another", message=b"mine"), Held)
        for waited in (self.lease_ms, 2 * self.lease_ms):
            assert record.deadline_ms is not None
            advance(record.deadline_ms - store.now_ms() + 1)
            (swept,) = store.sweep(limit=10, requeue_ms=self.lease_ms).requeued
            assert swept.deadline_ms is not None
            assert swept.deadline_ms - record.deadline_ms >= waited
            # No crash: it was never claimed.
            assert swept == dataclasses.replace(
                record, deadline_ms=swept.deadline_ms, copies=(TASK_ID,)
            )
            assert store.get(KEY) == swept
            record = swept
        claimed = self.claim(store)
        assert (claimed.message, claimed.crashes, claimed.reserved) == (None, 0, True)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).requeued == ()
