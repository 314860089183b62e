"""The contract of `sweep`, `requeue`, `prune`, `forget` and `close`: what sends again, and what removes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from celery_idempotent.records import (
    Claimed,
    EndState,
    Held,
    Identity,
    Reserved,
    Selection,
    Settled,
    State,
)
from celery_idempotent.stores import table
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    KEY,
    MESSAGE,
    NAMES,
    VALUE,
    Advance,
    ContractBase,
    all_at_once,
    crowd,
)

DAY_MS = 24 * 3_600_000


class UpkeepContract(ContractBase):
    """Sweeping, pruning, forgetting, closing."""

    @pytest.mark.parametrize("late_ms", [-1, 0, 1])
    def test_every_verb_calls_a_lease_over_at_the_same_millisecond(
        self, store: Store, stop_at: Callable[[int], None], late_ms: int
    ) -> None:
        """If a claim used ``<`` and a sweep ``<=``, there would be a moment in which a record is alive for one and dead
        for the other: a run could be taken over and renewed at once.
        """
        stop_at(self.claim(store).updated_ms)
        store.forget(KEY)
        claimed, requeued, swept, called = (
            self.claim(store, name, on_stale="requeue", message=MESSAGE) for name in NAMES[:4]
        )
        reserved = self.reserve(store, NAMES[4])
        assert claimed.deadline_ms == requeued.deadline_ms == reserved.deadline_ms
        assert claimed.deadline_ms is not None
        stop_at(claimed.deadline_ms + late_ms)
        over, left_ms = late_ms >= 0, max(-late_ms, 0)

        stats = store.stats()
        assert (stats.live, stats.stale) == ((0, 5) if over else (5, 0))
        assert len(store.list(Selection(stale=True)).records) == (4 if over else 0)
        for name, found in ((NAMES[3], called), (NAMES[4], reserved)):
            answer = self.try_reserve(store, name, task_id="another")
            assert isinstance(answer, Reserved) is over
            assert over or answer == Held(found, left_ms=left_ms)
        claim = self.try_claim(store, NAMES[0])
        assert isinstance(claim, Claimed) is over
        assert over or claim == Held(claimed, left_ms=left_ms)
        assert (store.requeue(NAMES[1], deadline_ms=self.lease_ms) is not None) is over
        report = store.sweep(limit=10, requeue_ms=self.lease_ms)
        assert [record.identity for record in report.requeued] == ([swept.identity] if over else [])

    def test_a_sweep_leaves_what_expired_or_was_forgotten(
        self, store: Store, advance: Advance
    ) -> None:
        """A sweep may read an index that still names records which are gone. It must not bring them back."""
        self.claim(store, NAMES[0])
        self.claim(store, NAMES[1])
        store.forget(NAMES[1])
        advance(self.lease_ms + self.keep_ms + 1)
        assert store.sweep(limit=10).interrupted == ()
        assert self.known(store, NAMES[:2]) == []

    def test_an_owner_that_comes_back_settles_for_the_copy_that_a_sweep_sent(
        self, store: Store, advance: Advance, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The copy may wait in its queue for longer than the end is usually kept."""
        monkeypatch.setattr(table, "COPIES_MS", DAY_MS)  # the model has none
        record = self.claim(store, task_id="first", on_stale="requeue", message=MESSAGE)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10, requeue_ms=self.lease_ms).requeued
        assert self.renew(store, record)
        assert self.settle(store, record, keep_ms=1)
        advance(self.keep_ms)
        assert isinstance(self.try_claim(store, task_id="first"), Settled)

    @pytest.mark.parametrize("on_stale", ["interrupt", "requeue"])
    def test_limited_sweeps_reach_everything_in_the_end(
        self, store: Store, advance: Advance, on_stale: str
    ) -> None:
        """After an outage there may be a million stale records. A sweep does a part, and asks to be called again. One
        that began at the start each time, and met ten records that it may not touch, would never come further.
        """
        for name in NAMES:
            self.claim(store, name, on_stale=on_stale, message=MESSAGE)
        advance(self.lease_ms + 1)
        swept: Counter[Identity] = Counter()
        for _ in range(10 * len(NAMES)):
            report = store.sweep(limit=10, requeue_ms=self.lease_ms)
            found = report.requeued if on_stale == "requeue" else report.interrupted
            assert len(found) <= 10
            swept.update(record.identity for record in found)
            if not report.more:
                break
        assert swept == Counter(NAMES)

    def test_sweeps_and_claims_at_once_count_each_crash_once(
        self, store: Store, advance: Advance
    ) -> None:
        """A sweep and a claim may find the same stale record. The one that writes counts the crash; the other looks
        again.
        """
        for name in NAMES:
            self.claim(store, name)
        advance(self.lease_ms + 1)

        def do(who: int) -> None:
            if who % 2:
                store.sweep(limit=1000)
            else:
                for name in NAMES:
                    self.try_claim(store, name)

        all_at_once(6, do)
        found = Counter(
            (record.state, record.crashes, record.attempts) for record in self.known(store, NAMES)
        )
        assert found == {(State.PROCESSING, 1, 2): len(NAMES)}

    @pytest.mark.parametrize("state", [State.COMPLETED, State.FAILED])
    def test_a_prune_leaves_what_is_within_its_retention(
        self, store: Store, advance: Advance, state: EndState
    ) -> None:
        self.settle(store, self.claim(store), state)
        self.claim(store, NAMES[0])
        advance(self.keep_ms / 2)
        assert store.prune(limit=10) == 0
        assert len(self.known(store, [KEY, NAMES[0]])) == 2

    def test_prunes_end(self, store: Store, advance: Advance) -> None:
        """``prune`` is called until it returns 0. A store that deletes by itself may return 0 at once."""
        for name in NAMES:
            self.settle(store, self.claim(store, name), State.FAILED)
        advance(self.keep_ms + 1)
        for _ in range(50):
            if not store.prune(limit=10):
                break
        assert store.prune(limit=10) == 0
        assert self.known(store, NAMES) == []

    def test_a_closed_store_may_be_used_again(self, store: Store) -> None:
        """An app is closed in a test, or before a fork, and used again. Connections are then opened anew."""
        record = self.claim(store)
        store.close()
        store.close()
        assert store.get(KEY) == record

    def test_the_times_doubled_are_counted_over_claims(
        self, store: Store, advance: Advance
    ) -> None:
        """A task that kills its worker each time is published ever more rarely, though each copy is claimed."""
        for doubled in range(3):
            self.requeueable(store, advance)
            (record,) = store.sweep(limit=10, requeue_ms=1000).requeued
            assert record.deadline_ms == record.updated_ms + 1000 * 2**doubled
            assert record.crashes == doubled + 1

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

    @pytest.mark.parametrize("on_stale", ["interrupt", "requeue"])
    def test_sweeps_at_once_return_each_record_once(
        self, store: Store, advance: Advance, on_stale: str
    ) -> None:
        """Sweeps may overlap, and several machines may run one. Each interruption is told and counted; two copies of
        one message would do no harm, thousands would.
        """
        for name in NAMES:
            self.claim(store, name, on_stale=on_stale, message=MESSAGE)
        with crowd(8) as together:
            for _ in range(2 if on_stale == "requeue" else 1):
                advance(self.lease_ms + 1)
                reports = together(lambda _: store.sweep(limit=1000, requeue_ms=self.lease_ms))
                swept = [
                    each for report in reports for each in report.requeued + report.interrupted
                ]
                assert Counter(record.identity for record in swept) == Counter(NAMES)
                assert {record.crashes for record in self.known(store, NAMES)} == {1}
                advance(self.lease_ms)
