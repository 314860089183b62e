"""The contract of refusals: a call that could not have a key is noted, and nothing else changes."""

from __future__ import annotations

import pytest

from celery_idempotent.records import Claimed, EndState, Held, Mismatched, Record, Settled, State
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
    all_at_once,
    crowd,
)


class RefusalContract(ContractBase):
    """Which calls are refused, and what that does not change."""

    def refused(self, store: Store) -> list[tuple[str, str]]:
        """Return the kinds and task ids that the record notes, the latest last."""
        return [(each.kind, each.task_id) for each in self.found(store).refusals]

    def conflict(self, store: Store, task_id: str = "another") -> None:
        """Claim a key that is held."""
        assert isinstance(self.try_claim(store, task_id=task_id), Held)

    def mismatch(self, store: Store, task_id: str = "another") -> None:
        """Claim the key with another fingerprint."""
        answer = self.try_claim(store, task_id=task_id, fingerprint=OTHER_FINGERPRINT)
        assert isinstance(answer, Mismatched)

    def test_who_is_refused_is_noted_with_the_time(self, store: Store, advance: Advance) -> None:
        record = self.claim(store)
        assert self.found(store).refusals == ()
        advance(self.lease_ms / 4)
        self.conflict(store, "second")
        advance(self.lease_ms / 4)
        self.mismatch(store, "third")
        first, second = self.found(store).refusals
        assert (first.kind, first.task_id) == ("conflict", "second")
        assert (second.kind, second.task_id) == ("mismatch", "third")
        assert record.created_ms + self.lease_ms / 4 <= first.at_ms
        assert first.at_ms + self.lease_ms / 4 <= second.at_ms

    @pytest.mark.parametrize("state", STATES)
    def test_a_mismatch_is_noted_in_every_state(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """It is noted for people, and the record's own times and state stay as they are."""
        before = self.bring_to(store, advance, state)
        self.mismatch(store)
        assert self.refused(store) == [("mismatch", "another")]
        answer = self.try_reserve(store, task_id="sender", fingerprint=OTHER_FINGERPRINT)
        assert isinstance(answer, Mismatched)
        assert self.refused(store) == [("mismatch", "another"), ("mismatch", "sender")]
        assert store.get(KEY) == before

    def test_neither_a_replay_nor_a_reservation_that_waits_is_a_refusal(self, store: Store) -> None:
        """A refusal is a call that did not get what it asked for. These two got an answer."""
        record = self.claim(store)
        assert isinstance(self.try_reserve(store, task_id="another"), Held)
        self.settle(store, record)
        assert isinstance(self.try_claim(store, task_id="another"), Settled)
        assert isinstance(self.try_reserve(store, task_id="another"), Settled)
        assert self.refused(store) == []

    def test_only_the_last_five_are_kept(self, store: Store) -> None:
        """A client that tries again every second for a day must not make the record grow."""
        self.claim(store)
        for number in range(8):
            self.conflict(store, f"task-{number}")
        assert self.refused(store) == [("conflict", f"task-{n}") for n in range(3, 8)]

    def test_who_is_refused_again_is_noted_once(self, store: Store, advance: Advance) -> None:
        """A message that comes back every few seconds would fill the list, and push out the others."""
        self.claim(store)
        self.conflict(store, "first")
        for _ in range(3):
            self.conflict(store)
        advance(self.lease_ms / 4)
        self.conflict(store)
        assert self.refused(store) == [("conflict", "first"), ("conflict", "another")]
        first, second = self.found(store).refusals
        assert second.at_ms >= first.at_ms + self.lease_ms / 4
        self.mismatch(store)
        assert self.refused(store)[1:] == [("conflict", "another"), ("mismatch", "another")]

    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_refusals_outlive_the_settle(self, store: Store, state: EndState) -> None:
        """“Who else tried?" is asked after the end, too. The value that duplicates get is not touched by noting it."""
        record = self.claim(store)
        self.conflict(store)
        assert self.settle(store, record, state)
        settled = self.found(store)
        assert self.refused(store) == [("conflict", "another")]
        self.mismatch(store)
        self.mismatch(store, "third")
        assert self.refused(store) == [
            ("conflict", "another"),
            ("mismatch", "another"),
            ("mismatch", "third"),
        ]
        found = self.found(store)
        assert found == settled
        assert (found.state, found.value) == (state, VALUE)
        assert store.mark_delivered(KEY, token=record.token)
        assert self.settle(store, record, state)
        assert self.found(store).delivered
        assert len(self.found(store).refusals) == 3

    def test_a_settled_record_without_a_value_notes_refusals(self, store: Store) -> None:
        record = self.claim(store, task_id="no-uuid", fingerprint=FINGERPRINT)
        self.settle(store, record, value=None)
        self.mismatch(store)
        found = self.found(store)
        assert (found.task_id, found.value, len(found.refusals)) == ("no-uuid", None, 1)

    def test_a_refusal_leaves_the_holder_alone(self, store: Store, advance: Advance) -> None:
        """A refusal writes to the record of a run at work: message, steps, token and lease must come through it
        unchanged.
        """
        record = self.claim(store, on_stale="requeue", message=MESSAGE)
        self.conflict(store)
        assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE)
        self.conflict(store, "third")
        assert self.renew(store, record)
        self.mismatch(store)
        found = self.found(store)
        assert (found.token, found.message, found.on_stale) == (record.token, MESSAGE, "requeue")
        assert found.steps == (("pay", VALUE),)
        assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE)
        assert self.found(store).steps == found.steps
        assert len(found.refusals) == 3
        advance(self.lease_ms + 1)
        report = store.sweep(limit=10)
        (swept,) = report.requeued
        assert (swept.message, swept.steps) == (MESSAGE, found.steps)
        assert len(self.found(store).refusals) == 3

    def test_refusals_stay_with_the_next_claim(self, store: Store, advance: Advance) -> None:
        """They belong to the operation, not to a run of it: an operator reads them after any number of attempts."""
        self.claim(store, message=MESSAGE)
        self.conflict(store)
        advance(self.lease_ms + 1)
        second = self.claim(store, message=MESSAGE, task_id="second")
        assert (second.attempts, second.crashes, second.message) == (2, 1, MESSAGE)
        assert self.refused(store) == [("conflict", "another")]
        interrupted = store.interrupt(KEY, token=second.token)
        assert interrupted is not None
        third = self.claim(store, message=None)
        assert (third.message, third.attempts) == (None, 3)
        assert self.refused(store) == [("conflict", "another")]

    @pytest.mark.parametrize("given_back", ["released", "forgotten", "forgotten when settled"])
    @pytest.mark.parametrize("later_ms", [0, 10])
    def test_refusals_go_with_their_record(
        self, store: Store, advance: Advance, given_back: str, later_ms: int
    ) -> None:
        """Also where a store notes them beside the record: the next one of the key begins without."""
        record = self.claim(store)
        self.conflict(store)
        if given_back == "released":
            assert store.release(KEY, token=record.token)
        else:
            if given_back != "forgotten":
                self.settle(store, record)
            assert store.forget(KEY)
        assert store.get(KEY) is None
        advance(later_ms)
        self.claim(store)
        assert self.refused(store) == []
        self.conflict(store, "third")
        assert self.refused(store) == [("conflict", "third")]

    @pytest.mark.parametrize("task_id", ["", "x" * 3_000, "ö" * 51, "a\0b", "a\n'\"\\%s ", "🚗"])
    def test_whatever_a_task_is_called_is_noted_within_bounds(
        self, store: Store, task_id: str
    ) -> None:
        """A task id may come from any client. It is cut, at a character's end, and can neither break nor fill the
        record.
        """
        record = self.claim(store)
        self.conflict(store, task_id)
        self.conflict(store, "last")
        noted, last = self.found(store).refusals
        whole = task_id.replace("\0", "\ufffd")
        assert noted.task_id.replace("\0", "\ufffd") == whole[: len(noted.task_id)]
        assert len(noted.task_id.encode()) <= 102
        assert len(noted.task_id) >= min(len(task_id), 50)
        assert last.task_id == "last"
        assert self.settle(store, record)
        assert len(self.found(store).refusals) == 2

    def test_conflicts_at_once_disturb_no_holder(self, store: Store) -> None:
        """To note a refusal is a write beside the run's own: a store that writes whole records could undo a step."""
        record = self.claim(store)

        def do(number: int) -> object:
            if number == 0:
                return [self.renew(store, record) for _ in range(10)]
            if number == 1:
                steps = [f"step-{n}" for n in range(10)]
                return [
                    store.checkpoint(KEY, token=record.token, name=name, value=VALUE)
                    for name in steps
                ]
            for _ in range(5):
                answer = self.try_claim(store, task_id=f"task-{number}")
                assert isinstance(answer, Held), answer
            return True

        renewed, checked, *_ = all_at_once(8, do)
        assert renewed == checked == [True] * 10
        found = self.found(store)
        assert len(found.steps) == 10
        assert 1 <= len(found.refusals) <= 5
        assert all(each.kind == "conflict" for each in found.refusals)

    def test_a_settle_and_conflicts_at_once_lose_no_result(self, store: Store) -> None:
        """A refusal that was read before the settle and is written after it must not bring PROCESSING back."""
        with crowd(6) as together:
            for name in NAMES[:5]:
                record = self.claim(store, name)
                ends = together(lambda n, r=record: self._settle_or_claim(store, r, n))  # type: ignore[misc]
                assert ends[0] is True
                found = store.get(name)
                assert found is not None
                assert (found.state, found.value) == (State.COMPLETED, VALUE)
                assert (found.token, found.task_id) == (record.token, TASK_ID)

    def _settle_or_claim(self, store: Store, record: Record, number: int) -> bool:
        if number == 0:
            return self.settle(store, record)
        for _ in range(5):
            answer = self.try_claim(store, record.identity, task_id=f"task-{number}")
            assert not isinstance(answer, Claimed), answer
        return True
