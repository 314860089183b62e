"""The contract of `reserve`: who publishes, under which task id, and what becomes of it."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import (
    Claimed,
    EndState,
    Held,
    Identity,
    Mismatched,
    Reserved,
    Settled,
    State,
)
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    FINGERPRINT,
    KEY,
    MESSAGE,
    NAMES,
    OTHER_FINGERPRINT,
    STATES,
    TASK_ID,
    VALUE,
    Advance,
    ContractBase,
    attempt,
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

    def test_an_unclaimed_key_is_reserved(self, store: Store) -> None:
        record = self.reserve(store)
        assert (record.identity, record.state) == (KEY, State.QUEUED)
        assert (record.task_id, record.worker) == (TASK_ID, "")
        assert (record.crashes, record.attempts, record.reserved) == (0, 0, True)
        assert record.fingerprint == FINGERPRINT
        assert record.token >= record.created_ms * 1000
        assert record.updated_ms == record.created_ms
        assert record.deadline_ms == record.created_ms + self.lease_ms
        assert (record.message, record.steps, record.value) == (None, (), None)
        assert store.get(KEY) == record

    def test_a_reservation_whose_answer_was_lost_gets_the_same_token_again(
        self, store: Store, advance: Advance
    ) -> None:
        """The publisher's task id tells its own reservation from that of another: asked again, it goes on with what it
        has.
        """
        first = self.reserve(store)
        for elapsed in (self.lease_ms / 2, self.lease_ms + 1):
            advance(elapsed)
            again = self.reserve(store)
            assert again.deadline_ms is not None
            assert first.deadline_ms is not None
            assert again.deadline_ms > first.deadline_ms
            assert dataclasses.replace(again, deadline_ms=first.deadline_ms) == first
            assert store.get(KEY) == again

    def test_a_reserved_key_is_held_for_other_tasks(self, store: Store, advance: Advance) -> None:
        record = self.reserve(store)
        advance(self.lease_ms / 2)
        answer = self.try_reserve(store, task_id="another")
        assert isinstance(answer, Held)
        assert answer.record == record == store.get(KEY)
        assert 0 < answer.left_ms <= self.lease_ms / 2

    def test_past_its_deadline_a_key_is_reserved_anew_for_the_first_task(
        self, store: Store, advance: Advance
    ) -> None:
        """The first publisher died, before or after it sent its message. Under the same task id a second copy is a
        redelivery: should the first have been sent, it runs once.

        ::

            publisher A   reserve (task 1) ─ ✗ sent? nobody knows
            publisher B           the deadline passes ─ reserve (task 2) ─▶ Reserved for task 1 ─ sends under task 1
        """
        first = self.reserve(store)
        advance(self.lease_ms + 1)
        second = self.reserve(store, task_id="another")
        assert second.token > first.token
        assert second.updated_ms > first.updated_ms
        assert second.deadline_ms == second.updated_ms + self.lease_ms
        assert second == dataclasses.replace(
            first,
            token=second.token,
            updated_ms=second.updated_ms,
            deadline_ms=second.deadline_ms,
        )
        assert store.get(KEY) == second
        # Its answer may be lost as well; to others it is held.
        assert self.reserve(store, task_id="another").token == second.token
        assert isinstance(self.try_reserve(store, task_id="a third"), Held)
        assert store.release(KEY, token=first.token) is False

    def test_an_interrupted_key_is_reserved_for_the_new_task(self, store: Store) -> None:
        """A run has ended in a crash, and its message is not on its way any more: the new message has a task id of its
        own. Crashes and steps stay, since they belong to the operation.
        """
        first = self.claim(store, on_stale="requeue", message=MESSAGE)
        assert store.checkpoint(KEY, token=first.token, name="pay", value=VALUE)
        interrupted = store.interrupt(KEY, token=first.token)
        assert interrupted is not None
        second = self.reserve(store, task_id="another")
        assert second.token > first.token
        assert second == dataclasses.replace(
            interrupted,
            state=State.QUEUED,
            token=second.token,
            task_id="another",
            worker="",
            updated_ms=second.updated_ms,
            deadline_ms=second.updated_ms + self.lease_ms,
            reserved=True,
            # What was to be published for the task before.
            on_stale="interrupt",
            message=None,
        )
        assert (second.crashes, second.attempts, len(second.steps)) == (1, 1, 1)
        assert store.get(KEY) == second

    def test_a_key_at_work_is_held(self, store: Store) -> None:
        """Also for the task id that works on it: the publisher gets that task's ``AsyncResult``, and sends nothing."""
        record = self.claim(store)
        for task_id in (TASK_ID, "another"):
            answer = self.try_reserve(store, task_id=task_id)
            assert isinstance(answer, Held)
            assert answer.record == record == store.get(KEY)
            assert 0 < answer.left_ms <= self.lease_ms

    def test_a_stale_key_is_held_for_no_time(self, store: Store, advance: Advance) -> None:
        """Only a worker may take over a run that did not come back. "0 ms left" tells the publisher to send its
        message.
        """
        record = self.bring_to(store, advance, "STALE")
        assert self.try_reserve(store, task_id="another") == Held(record, left_ms=0)
        assert store.get(KEY) == record

    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_a_settled_key_is_not_reserved(
        self, store: Store, advance: Advance, state: EndState
    ) -> None:
        assert self.settle(store, self.claim(store), state)
        advance(self.lease_ms / 2)
        answer = self.try_reserve(store)
        assert isinstance(answer, Settled)
        assert answer.record == store.get(KEY)
        assert (answer.record.state, answer.record.value) == (state, VALUE)
        assert answer.age_ms >= self.lease_ms // 2

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

    @pytest.mark.parametrize("late", [False, True])
    @pytest.mark.parametrize("task_id", [TASK_ID, "another"])
    def test_a_reserved_key_is_claimed_by_any_task(
        self, store: Store, advance: Advance, task_id: str, late: bool
    ) -> None:
        """Whichever message with this key comes first may run: a second publisher may have failed to reach the store,
        and have sent its message unreserved.
        """
        reserved = self.reserve(store)
        if late:
            advance(self.lease_ms + 1)
        mine = attempt()
        record = self.claim(store, task_id=task_id, attempt=mine)
        assert record.state is State.PROCESSING
        assert record.token > reserved.token
        assert (record.crashes, record.attempts, record.reserved) == (0, 1, True)
        assert (record.task_id, record.created_ms) == (task_id, reserved.created_ms)
        assert store.get(KEY) == record
        # Its answer may be lost.
        assert self.claim(store, attempt=mine).token == record.token
        assert isinstance(self.try_claim(store), Held)

    def test_a_reservation_stays_one_over_crashes(self, store: Store, advance: Advance) -> None:
        """``reserved`` says later whether a release for a retry makes the key QUEUED again: somebody waits for its
        outcome.
        """
        self.reserve(store)
        first = self.claim(store)
        store.interrupt(KEY, token=first.token)
        assert self.claim(store).reserved
        advance(self.lease_ms + 1)
        record = self.claim(store)
        assert (record.reserved, record.crashes, record.attempts) == (True, 2, 3)

    def test_nobody_holds_a_reserved_key(self, store: Store) -> None:
        """A reservation has a token, too. With that, no verb of a run may be carried out: there is no run."""
        record = self.reserve(store)
        assert store.interrupt(KEY, token=record.token) is None
        assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE) is False
        assert not self.renew(store, record)
        assert store.get(KEY) == record

    def test_a_settle_with_its_own_token_is_accepted_while_a_key_is_queued(
        self, store: Store
    ) -> None:
        """A run released its key for a retry, and took effect all the same. Its own token is still the last one."""
        self.reserve(store)
        record = self.claim(store)
        store.release(KEY, token=record.token, requeue_ms=1000)
        assert self.settle(store, record)
        assert self.found(store).state is State.COMPLETED
        assert isinstance(self.try_reserve(store), Settled)

    def test_a_reserved_record_outlives_its_deadline_and_then_goes(
        self, store: Store, advance: Advance
    ) -> None:
        self.reserve(store)
        advance(self.lease_ms + self.keep_ms / 2)
        assert store.get(KEY) is not None
        advance(self.keep_ms / 2 + 1)
        assert store.get(KEY) is None
        assert self.reserve(store, task_id="another").task_id == "another"

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
