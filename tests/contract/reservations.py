"""The contract of `reserve`: who publishes, under which task id, and what becomes of it."""

from __future__ import annotations

import pytest

from celery_idempotent.records import (
    Claimed,
    Held,
    Identity,
    Mismatched,
    Reserved,
)
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    FINGERPRINT,
    KEY,
    NAMES,
    OTHER_FINGERPRINT,
    STATES,
    TASK_ID,
    Advance,
    ContractBase,
    crowd,
)


class ReservationContract(ContractBase):
    """Reservations, and claims of what was reserved."""

    def test_it_says_whether_its_transaction_may_be_rolled_back(self, store: Store) -> None:
        """A request that meets an uncommitted reservation waits for its COMMIT instead of promising that the task will
        run.
        """
        for uncommitted in (True, False, True):
            record = self.reserve(store, uncommitted=uncommitted)
            assert record.uncommitted is uncommitted
            assert self.found(store) == record
        assert self.claim(store).uncommitted is False

    def test_a_reserved_key_is_held_for_other_tasks(self, store: Store, advance: Advance) -> None:
        record = self.reserve(store)
        advance(self.lease_ms / 2)
        answer = self.try_reserve(store, task_id="another")
        assert isinstance(answer, Held)
        assert answer.record == record == store.get(KEY)
        assert 0 < answer.left_ms <= self.lease_ms / 2

    def test_a_stale_key_is_held_for_no_time(self, store: Store, advance: Advance) -> None:
        """Only a worker may take over a run that did not come back. "0 ms left" tells the publisher to send its
        message.
        """
        record = self.bring_to(store, advance, "STALE")
        assert self.try_reserve(store, task_id="another") == Held(record, left_ms=0)
        assert store.get(KEY) == record

    @pytest.mark.parametrize("state", STATES)
    def test_another_fingerprint_is_a_mismatch_before_all_else(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """Also before "held": otherwise the caller would get the ``AsyncResult`` of a call with other arguments."""
        record = self.bring_to(store, advance, state)
        for task_id in (TASK_ID, "another"):
            answer = self.try_reserve(store, task_id=task_id, fingerprint=OTHER_FINGERPRINT)
            assert answer == Mismatched(record)
        assert store.get(KEY) == record

    @pytest.mark.parametrize("state", STATES)
    @pytest.mark.parametrize(("known", "asked"), [(None, FINGERPRINT), (FINGERPRINT, None)])
    def test_a_reservation_is_equal_to_any_if_either_side_lacks_a_fingerprint(
        self,
        store: Store,
        advance: Advance,
        state: str,
        known: bytes | None,
        asked: bytes | None,
    ) -> None:
        self.bring_to(store, advance, state, fingerprint=known)
        answer = self.try_reserve(store, task_id="another", fingerprint=asked)
        assert not isinstance(answer, Mismatched)
        if isinstance(answer, Reserved):
            assert answer.record.fingerprint == FINGERPRINT
        advance(self.lease_ms + 1)
        answer = self.try_reserve(store, task_id="another", fingerprint=asked)
        assert not isinstance(answer, Mismatched)

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
