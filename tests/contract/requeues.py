"""The contract of `requeue`, and of sweeps that requeue: whose message is lost is sent again."""

from __future__ import annotations

import dataclasses
from collections import Counter

import pytest

from celery_idempotent.records import State
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    KEY,
    MESSAGE,
    NAMES,
    VALUE,
    Advance,
    ContractBase,
    crowd,
)


class RequeueContract(ContractBase):
    """Requeueing, by a sweep and by an operator."""

    @pytest.mark.parametrize(
        ("on_stale", "message"), [("requeue", None), ("fail", MESSAGE), ("interrupt", MESSAGE)]
    )
    def test_a_sweep_interrupts_what_it_cannot_or_shall_not_requeue(
        self, store: Store, advance: Advance, on_stale: str, message: bytes | None
    ) -> None:
        """``"requeue"`` without a message: it could not be serialized, or the call was an eager one."""
        record = self.requeueable(store, advance, on_stale=on_stale, message=message)
        report = store.sweep(limit=10)
        (swept,) = report.interrupted
        assert report.requeued == ()
        assert (swept.state, swept.crashes) == (State.INTERRUPTED, 1)
        assert (swept.on_stale, swept.message) == (record.on_stale, record.message)

    def test_who_did_not_run_it_settles_no_state_but_the_one_that_they_saw(
        self, store: Store, advance: Advance
    ) -> None:
        """A sweep leaves the token as it is. So the token alone does not show an operator that the record has
        changed.
        """
        seen = self.requeueable(store, advance)
        (queued,) = store.sweep(limit=10, requeue_ms=self.lease_ms).requeued
        assert not self.settle(store, seen, State.FAILED, restore=False)
        assert store.get(KEY) == queued

    def test_a_message_that_nobody_sent_is_requeued_for_twice_as_long(
        self, store: Store, advance: Advance
    ) -> None:
        """While no worker runs, each sweep would publish one more copy: after a weekend there would be thousands. The
        pause doubles, so there are a few.
        """
        self.requeueable(store, advance)
        waited = self.lease_ms // 4
        (record,) = store.sweep(limit=10, requeue_ms=waited).requeued
        for _ in range(4):
            assert store.sweep(limit=10, requeue_ms=waited).requeued == ()
            assert record.deadline_ms is not None
            advance(record.deadline_ms - store.now_ms() + 1)
            (again,) = store.sweep(limit=10, requeue_ms=self.lease_ms // 4).requeued
            waited *= 2
            assert again.deadline_ms is not None
            # No crash: it was never claimed.
            assert again == dataclasses.replace(record, deadline_ms=again.deadline_ms)
            assert again.deadline_ms - record.deadline_ms >= waited
            record = again

    def test_the_times_doubled_are_counted_over_claims(
        self, store: Store, advance: Advance
    ) -> None:
        """A task that kills its worker each time is published ever more rarely, though each copy is claimed."""
        for doubled in range(3):
            self.requeueable(store, advance)
            (record,) = store.sweep(limit=10, requeue_ms=1000).requeued
            assert record.deadline_ms == record.updated_ms + 1000 * 2**doubled
            assert record.crashes == doubled + 1

    def test_a_claim_with_a_message_keeps_it_until_its_retry_is_out(
        self, store: Store, advance: Advance
    ) -> None:
        """The worker may die between the release and the publishing: the message stays until the retry has the key."""
        record = self.claim(store, on_stale="requeue", message=MESSAGE)
        assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE)
        for _ in range(2):
            # The answer to the first one may be lost.
            assert store.release(KEY, token=record.token, requeue_ms=2 * self.lease_ms) is True
            found = self.found(store)
            assert found == dataclasses.replace(
                record,
                state=State.QUEUED,
                steps=(("pay", VALUE),),
                updated_ms=found.updated_ms,
                deadline_ms=found.updated_ms + 2 * self.lease_ms,
            )
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).requeued == ()
        again = self.claim(store, message=b"the retry")
        assert (again.attempts, again.crashes, again.message) == (2, 0, b"the retry")
        assert again.reserved is False

    def test_a_retry_whose_sender_died_is_requeued(self, store: Store, advance: Advance) -> None:
        """Between the release and the publishing of a retry the record alone knows that a retry is due."""
        self.reserve(store)
        record = self.claim(store, message=MESSAGE)
        assert store.checkpoint(KEY, token=record.token, name="pay", value=VALUE)
        store.release(KEY, token=record.token, requeue_ms=self.lease_ms)
        assert store.sweep(limit=10).requeued == ()
        advance(self.lease_ms + 1)
        (swept,) = store.sweep(limit=10).requeued
        assert (swept.message, swept.crashes, swept.task_id) == (MESSAGE, 0, record.task_id)
        assert swept.steps == (("pay", VALUE),)
        assert self.claim(store).steps == swept.steps

    def test_sweeps_at_once_requeue_each_record_once(self, store: Store, advance: Advance) -> None:
        """Sweeps may overlap, and several machines may run one. Two copies of one message would do no harm; thousands
        would.
        """
        for name in NAMES:
            self.claim(store, name, on_stale="requeue", message=MESSAGE)
        with crowd(8) as together:
            for crashes in (1, 1):
                advance(self.lease_ms + 1)
                reports = together(lambda _: store.sweep(limit=1000, requeue_ms=self.lease_ms))
                swept = Counter(record.identity for report in reports for record in report.requeued)
                assert swept == Counter(NAMES)
                assert {record.crashes for record in self.known(store, NAMES)} == {crashes}
                advance(self.lease_ms)

    def test_a_limited_sweep_says_that_there_is_more_to_requeue(
        self, store: Store, advance: Advance
    ) -> None:
        """After an outage there may be a million stale records. A sweep does a part, and asks to be called again."""
        for name in NAMES:
            self.claim(store, name, on_stale="requeue", message=MESSAGE)
        advance(self.lease_ms + 1)
        swept: Counter[object] = Counter()
        for _ in range(10 * len(NAMES)):
            report = store.sweep(limit=10, requeue_ms=self.lease_ms)
            assert len(report.requeued) <= 10
            swept.update(record.identity for record in report.requeued)
            if not report.more:
                break
        assert swept == Counter(NAMES)
