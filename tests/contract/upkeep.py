"""The contract of `sweep`, `prune`, `forget` and `close`: what removes old records."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable

import pytest

from celery_idempotent.records import Claimed, EndState, Held, Identity, Reserved, Selection, State
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    KEY,
    MESSAGE,
    NAMES,
    STATES,
    Advance,
    ContractBase,
    all_at_once,
)


class UpkeepContract(ContractBase):
    """Sweeping, pruning, forgetting, closing."""

    def test_a_sweep_interrupts_what_is_stale(self, store: Store, advance: Advance) -> None:
        record = self.claim(store)
        advance(self.lease_ms + 1)
        report = store.sweep(limit=10)
        (swept,) = report.interrupted
        assert report.more is False
        assert swept == store.get(KEY)
        assert swept.updated_ms > record.updated_ms
        assert swept == dataclasses.replace(
            record,
            state=State.INTERRUPTED,
            crashes=1,
            deadline_ms=None,
            updated_ms=swept.updated_ms,
            swept=True,
        )

    @pytest.mark.parametrize("late_ms", [-1, 0, 1])
    def test_every_verb_calls_a_lease_over_at_the_same_millisecond(
        self, store: Store, stop_at: Callable[[int], None], late_ms: int
    ) -> None:
        """If a claim used ``<`` and a sweep ``<=``, there would be a moment in which a record is alive for one and dead
        for the other: a run could be taken over and renewed at once.
        """
        stop_at(self.claim(store).updated_ms)
        store.forget(KEY)
        claimed, requeued, swept = (
            self.claim(store, name, on_stale="requeue", message=MESSAGE) for name in NAMES[:3]
        )
        reserved = self.reserve(store, NAMES[3])
        assert claimed.deadline_ms == requeued.deadline_ms == reserved.deadline_ms
        assert claimed.deadline_ms is not None
        stop_at(claimed.deadline_ms + late_ms)
        over, left_ms = late_ms >= 0, max(-late_ms, 0)

        stats = store.stats()
        assert (stats.live, stats.stale) == ((0, 4) if over else (4, 0))
        assert len(store.list(Selection(stale=True)).records) == (3 if over else 0)
        held = self.try_reserve(store, NAMES[2], task_id="another")
        assert held == Held(swept, left_ms=left_ms)
        answer = self.try_reserve(store, NAMES[3], task_id="another")
        assert isinstance(answer, Reserved) is over
        assert over or answer == Held(reserved, left_ms=left_ms)
        claim = self.try_claim(store, NAMES[0])
        assert isinstance(claim, Claimed) is over
        assert over or claim == Held(claimed, left_ms=left_ms)
        assert (store.requeue(NAMES[1], deadline_ms=self.lease_ms) is not None) is over
        report = store.sweep(limit=10, requeue_ms=self.lease_ms)
        assert [record.identity for record in report.requeued] == ([NAMES[2]] if over else [])

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

    def test_limited_sweeps_reach_everything_in_the_end(
        self, store: Store, advance: Advance
    ) -> None:
        """A sweep that began at the start each time, and met ten records that it may not touch, would never come
        further.
        """
        for name in NAMES:
            self.claim(store, name)
        advance(self.lease_ms + 1)
        swept: Counter[Identity] = Counter()
        for _ in range(10 * len(NAMES)):
            report = store.sweep(limit=10)
            assert len(report.interrupted) <= 10
            swept.update(record.identity for record in report.interrupted)
            if not report.more:
                break
        assert swept == Counter(NAMES)

    def test_sweeps_at_once_interrupt_each_record_once(
        self, store: Store, advance: Advance
    ) -> None:
        """Each interruption is reported to people and counted: exactly one sweep returns each record."""
        for name in NAMES:
            self.claim(store, name)
        advance(self.lease_ms + 1)
        reports = all_at_once(8, lambda _: store.sweep(limit=1000))
        swept = Counter(record.identity for report in reports for record in report.interrupted)
        assert swept == Counter(NAMES)
        assert {record.crashes for record in self.known(store, NAMES)} == {1}

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

    @pytest.mark.parametrize("state", STATES)
    def test_a_forgotten_key_is_free_whatever_its_state_was(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """With all that belongs to it: indexes and steps. Only the token outlives it."""
        token = self.bring_to(store, advance, state).token
        assert store.forget(KEY) is True
        assert store.get(KEY) is None
        assert store.forget(KEY) is False
        record = self.claim(store)
        assert record.token > token
        assert (record.crashes, record.attempts) == (0, 1)

    def test_an_unknown_key_has_no_record(self, store: Store) -> None:
        assert store.get(KEY) is None
        assert store.forget(KEY) is False

    def test_a_closed_store_may_be_used_again(self, store: Store) -> None:
        """An app is closed in a test, or before a fork, and used again. Connections are then opened anew."""
        record = self.claim(store)
        store.close()
        store.close()
        assert store.get(KEY) == record

    def test_it_is_a_store(self, store: Store) -> None:
        assert isinstance(store, Store)
