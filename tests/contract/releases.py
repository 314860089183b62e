"""The contract of `release` and `interrupt`: how a key is given back without an end."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import Held, State
from celery_idempotent.stores.base import Store
from tests.contract.base import KEY, MESSAGE, Advance, ContractBase


class ReleaseContract(ContractBase):
    """Releasing, for good or for a retry, and interrupting."""

    def test_a_released_key_is_free(self, store: Store) -> None:
        record = self.claim(store)
        assert store.release(KEY, token=record.token) is True
        assert store.get(KEY) is None
        again = self.claim(store)
        assert (again.crashes, again.attempts) == (0, 1)

    def test_a_released_key_is_not_swept(self, store: Store, advance: Advance) -> None:
        """An index of leases must lose the key, or a sweep would count a crash of a run that failed properly."""
        store.release(KEY, token=self.claim(store).token)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).interrupted == ()

    def test_a_release_whose_answer_was_lost_does_no_harm_again(self, store: Store) -> None:
        """The release is sent again when its answer is lost. By then the key may have a new owner, whose claim must
        stay.
        """
        first = self.claim(store)
        assert store.release(KEY, token=first.token)
        assert store.release(KEY, token=first.token) is False
        second = self.claim(store)
        assert store.release(KEY, token=first.token) is False
        assert store.get(KEY) == second

    @pytest.mark.parametrize("state", ["INTERRUPTED", "COMPLETED", "FAILED"])
    def test_what_nobody_holds_is_neither_released_nor_interrupted(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """The token is right, but there is no run any more: a worker that asks a second time changes nothing."""
        record = self.bring_to(store, advance, state)
        assert store.release(KEY, token=record.token) is False
        assert store.release(KEY, token=record.token, requeue_ms=1) is False
        assert store.interrupt(KEY, token=record.token) is None
        assert store.get(KEY) == record

    def test_an_unknown_key_is_neither_released_nor_interrupted(self, store: Store) -> None:
        assert store.release(KEY, token=1) is False
        assert store.interrupt(KEY, token=1) is None
        assert store.get(KEY) is None

    def test_an_interrupted_record_stays_with_one_crash_more(
        self, store: Store, advance: Advance
    ) -> None:
        record = self.claim(store)
        advance(10)
        found = store.interrupt(KEY, token=record.token)
        assert found is not None
        assert found == store.get(KEY)
        assert found.updated_ms > record.updated_ms
        assert found == dataclasses.replace(
            record,
            state=State.INTERRUPTED,
            crashes=1,
            deadline_ms=None,
            updated_ms=found.updated_ms,
        )

    def test_an_interruption_whose_answer_was_lost_counts_once(self, store: Store) -> None:
        """Two sweeps may look at one record, or one may repeat itself."""
        record = self.claim(store)
        assert store.interrupt(KEY, token=record.token) is not None
        store.interrupt(KEY, token=record.token)
        found = store.get(KEY)
        assert found is not None
        assert found.crashes == 1

    def test_an_interrupted_record_lives_as_long_as_it_would_have(
        self, store: Store, advance: Advance
    ) -> None:
        """Interrupting is no reason to store it for longer: its life was set by the claim."""
        record = self.claim(store)
        advance(self.lease_ms)
        store.interrupt(KEY, token=record.token)
        advance(self.keep_ms / 2)
        assert store.get(KEY) is not None
        advance(self.keep_ms / 2 + 1)
        assert store.get(KEY) is None

    def test_an_interrupted_record_is_not_swept_again(self, store: Store, advance: Advance) -> None:
        store.interrupt(KEY, token=self.claim(store).token)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).interrupted == ()

    def test_a_retry_makes_a_reserved_key_queued_again(
        self, store: Store, advance: Advance
    ) -> None:
        """Freed instead, the key could be reserved by another publisher between a run and its retry, and would run for
        both.
        """
        self.reserve(store)
        record = self.claim(store, task_id="another", on_stale="requeue", message=MESSAGE)
        advance(10)
        for _ in range(2):
            # The answer to the first one may be lost.
            assert store.release(KEY, token=record.token, requeue_ms=2 * self.lease_ms) is True
            found = self.found(store)
            assert found.updated_ms > record.updated_ms
            assert found == dataclasses.replace(
                record,
                state=State.QUEUED,
                updated_ms=found.updated_ms,
                deadline_ms=found.updated_ms + 2 * self.lease_ms,
            )
        assert isinstance(self.try_reserve(store, task_id="a third"), Held)
        again = self.claim(store, task_id="another")
        assert (again.crashes, again.attempts) == (0, 2)

    def test_what_waits_for_a_retry_lives_as_much_longer(
        self, store: Store, advance: Advance
    ) -> None:
        """A retry may be due in a week. Its record must not expire before it."""
        self.reserve(store)
        record = self.claim(store)
        store.release(KEY, token=record.token, requeue_ms=10 * self.keep_ms)
        advance(10 * self.keep_ms + self.lease_ms + self.keep_ms / 2)
        assert store.get(KEY) is not None
        advance(self.keep_ms / 2 + 1)
        assert store.get(KEY) is None

    def test_without_a_retry_a_reserved_key_is_free_again(self, store: Store) -> None:
        self.reserve(store)
        assert store.release(KEY, token=self.claim(store).token) is True
        assert store.get(KEY) is None

    def test_a_key_without_reservation_and_message_is_free_for_its_retry(
        self, store: Store
    ) -> None:
        """Nothing waits for this key and nothing could be sent for it, so no record is needed: the retry claims it
        afresh.
        """
        record = self.claim(store)
        assert store.release(KEY, token=record.token, requeue_ms=1000) is True
        assert store.get(KEY) is None

    def test_a_reservation_is_released(self, store: Store) -> None:
        record = self.reserve(store)
        assert store.release(KEY, token=record.token + 1) is False
        assert store.get(KEY) == record
        assert store.release(KEY, token=record.token) is True
        assert store.get(KEY) is None
        assert self.reserve(store, task_id="another").token > record.token

    def test_a_reservation_that_was_claimed_is_not_released(self, store: Store) -> None:
        """The publisher gives its key back because the broker failed; but the message had arrived, and is at work."""
        reserved = self.reserve(store)
        record = self.claim(store)
        assert store.release(KEY, token=reserved.token) is False
        assert store.get(KEY) == record
