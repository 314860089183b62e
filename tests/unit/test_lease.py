"""The claim that a run holds, and the one thread that keeps all claims of a process alive."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from celery_idempotent.errors import LeaseLost, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.claim import Claim, Phase
from celery_idempotent.protocol.lease import Heartbeat
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Identity, Renewal, State
from celery_idempotent.signals import counters
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.support.programs import run
from tests.support.records import claim_key
from tests.support.waiting import wait_for


class Store(MemoryStore):
    """Notes when it was asked to renew what, and fails as told."""

    def __init__(self, clock: Any = None) -> None:
        super().__init__(clock)
        self.renewals: list[tuple[float, list[str]]] = []
        self.errors: list[Exception] = []

    def renew(self, leases: Sequence[Renewal]) -> list[bool]:
        self.renewals.append((time.monotonic(), [each.identity.key for each in leases]))
        if self.errors:
            raise self.errors.pop(0)
        return super().renew(leases)

    def times(self, key: str) -> list[float]:
        return [at for at, keys in self.renewals if key in keys]


def take(store: MemoryStore, key: str = "k", *, lease_ms: int = 300) -> Claim:
    identity = Identity(namespace="lease", scope="", key=key)
    sent = time.monotonic()
    record = claim_key(store, identity, lease_ms=lease_ms, keep_ms=10_000, task_id="t", worker="w")
    claim = Claim()
    claim.phase, claim.store, claim.record = Phase.RUNNING, store, record
    claim.identity, claim.renewed_at, claim.steps = identity, sent, {}
    claim.policy = Policy(lease_ms=lease_ms, retention_ms=10_000)
    return claim


def stepping(store: MemoryStore) -> Claim:
    """A claim whose steps all come back as done."""
    claim = take(store, lease_ms=60_000)
    claim.codec = SimpleNamespace(dump_step=lambda *_: None, load_value=lambda _: "done")  # type: ignore[assignment]
    return claim


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def heartbeat() -> Iterator[Heartbeat]:
    """A heartbeat of the test's own; its thread ends with the test."""
    counters._forget()  # what the store of another test did not take, and a thread would live for
    before = known_threads()
    heartbeat = Heartbeat()
    yield heartbeat
    heartbeat._due.clear()
    heartbeat._renew_due = sys.exit  # type: ignore[method-assign]  # ends the thread
    heartbeat._ring()
    # A thread that is about to end would be counted by the next test.
    wait_for(lambda: known_threads() <= before, what="the end of the thread")


def known_threads() -> set[str]:
    """Return the threads of this process, known to Python or not."""
    return {entry.name for entry in Path("/proc/self/task").iterdir()}


class TestClaim:
    @pytest.mark.parametrize("ask", [Claim.renew, Claim.ensure])
    @pytest.mark.parametrize("end", ["alive", "taken", "forgotten", "interrupted"])
    def test_a_claim_is_renewed_until_it_has_ended(self, ask, end):
        clock = FakeClock()
        store = MemoryStore(clock)
        claim = take(store, lease_ms=1000)
        identity = claim.record.identity
        for _ in range(2):
            clock.advance(900)
            ask(claim)
        if end == "taken":
            clock.advance(1000)
            take(store)
        elif end == "forgotten":
            store.forget(identity)
        elif end == "interrupted":
            store.interrupt(identity, token=claim.token)
        else:
            clock.advance(900)
            assert not store.get(identity).stale(clock() // 1000)
            return
        with pytest.raises(LeaseLost, match="key k"):
            ask(claim)
        assert claim.lost

    def test_a_store_that_is_away_for_longer_is_not_a_lost_claim(self, store: Store):
        claim = take(store, lease_ms=400)
        store.errors = [StoreUnavailable("away")] * 1000
        # It lives from when it was asked for, not from the answer.
        claim.renewed_at -= 0.4
        with pytest.raises(StoreUnavailable):
            claim.ensure()
        assert len(store.renewals) == 1
        claim.renewed_at = time.monotonic()
        with pytest.raises(StoreUnavailable):
            claim.ensure()
        last = store.times("k")[-1]
        # It asks until the lease may be over, and what is sent later proves nothing.
        assert 0.4 <= last - claim.renewed_at < 0.6
        assert not claim.lost
        store.errors.clear()
        claim.ensure()

    def test_a_step_whose_claim_is_gone_raises(self, store: Store):
        claim, done = stepping(store), []
        store.forget(claim.record.identity)
        for _ in range(2):
            with pytest.raises(LeaseLost):
                claim.step("pay", lambda: done.append(1))
        # The first had to be done to be found unrecorded. From then on that is known.
        assert done == [1]

    @pytest.mark.parametrize("phase", [Phase.RELEASED, Phase.ENDED])
    def test_a_step_is_not_begun_once_the_claim_is_known_to_be_gone(self, store: Store, phase):
        claim = stepping(store)
        claim.phase = phase
        with pytest.raises(LeaseLost):
            claim.step("pay", lambda: pytest.fail("it was called"))
        assert claim.phase is phase


class TestHeartbeat:
    def test_a_claim_is_renewed_at_a_third_of_its_lease(self, heartbeat, store):
        claim = take(store, lease_ms=600)
        start = claim.renewed_at
        heartbeat.add(claim)
        wait_for(lambda: len(store.renewals) >= 3, what="three renewals", interval=0.005)
        beats = [at - start for at in store.times("k")][:3]
        # Never early; late as the machine may be, but not by a whole beat.
        assert beats[0] >= 0.199
        assert beats[1] - beats[0] >= 0.199
        assert beats[2] < 3 * 0.2 + 0.2
        assert store.get(claim.record.identity).state is State.PROCESSING

    def test_a_task_shorter_than_a_third_of_its_lease_costs_no_renewal(self, heartbeat, store):
        for n in range(300):
            claim = take(store, str(n), lease_ms=3000)
            heartbeat.add(claim)
            heartbeat.remove(claim)
        keeper = take(store, "keeper", lease_ms=300)
        heartbeat.add(keeper)
        wait_for(lambda: len(store.times("keeper")) >= 2, what="beats", interval=0.005)
        assert {key for _, keys in store.renewals for key in keys} == {"keeper"}

    def test_a_shorter_lease_is_not_kept_waiting_by_a_longer_one(self, heartbeat, store):
        long, short = take(store, "long", lease_ms=600_000), take(store, "short", lease_ms=1_500)
        heartbeat.add(long)
        wait_for(lambda: heartbeat._looks_at < float("inf"), what="the thread to wait")
        start = short.renewed_at
        heartbeat.add(short)
        wait_for(lambda: store.times("short"), 30, "the short one's renewal", interval=0.005)
        assert 0.499 <= store.times("short")[0] - start < 1.5
        assert store.times("long") == []

    def test_claims_of_one_store_that_are_due_are_renewed_in_one_call(self, heartbeat, store):
        claims = [take(store, str(n), lease_ms=600) for n in range(20)]
        for claim in claims:
            heartbeat.add(claim)
        wait_for(lambda: len(store.times("19")) >= 2, what="beats", interval=0.005)
        assert len(store.renewals) < 20

    def test_a_lost_claim_is_flagged_and_not_asked_for_again(self, heartbeat, store, caplog):
        lost, kept = take(store, "lost"), take(store, "kept")
        store.forget(lost.record.identity)
        heartbeat.add(lost)
        heartbeat.add(kept)
        wait_for(lambda: lost.lost, what="the loss to be noticed")
        before = len(store.times("kept"))
        wait_for(lambda: len(store.times("kept")) >= before + 2, what="beats", interval=0.005)
        assert len(store.times("lost")) == 1
        assert not kept.lost
        assert f"lease key lost (token {lost.token}) is lost before it is settled" in caplog.text

    @pytest.mark.parametrize(
        "error", [StoreUnavailable, StoreMisconfigured, ConnectionError, RuntimeError, KeyError]
    )
    def test_it_survives_whatever_the_store_raises(self, heartbeat, store, error, caplog):
        claim = take(store, lease_ms=900)
        store.errors = [error("away"), error("away")]
        heartbeat.add(claim)
        wait_for(lambda: len(store.renewals) >= 4, what="renewals after the errors", interval=0.005)
        first, second = store.times("k")[:2]
        assert second - first < 0.29, "it waited for the next beat"
        assert not claim.lost
        assert "could not renew 1 claims" in caplog.text
        claim.ensure()

    def test_an_import_starts_no_thread_and_a_claim_one_that_keeps_no_process_from_ending(self):
        code = (
            "import os, celery_idempotent.celery.task;"
            "print(len(os.listdir('/proc/self/task')));"
            "from celery_idempotent.protocol.lease import heartbeat;"
            "from celery_idempotent.stores.memory import MemoryStore;"
            "from tests.unit.test_lease import take;"
            "claim = take(MemoryStore(), lease_ms=60_000); heartbeat.add(claim);"
            "print(len(os.listdir('/proc/self/task')))"
        )
        assert run("-c", code).stdout.split() == ["1", "2"]


def test_an_undo_is_called_until_it_is_answered_and_again_for_a_late_command(
    heartbeat: Heartbeat, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("celery_idempotent.protocol.lease._LOOKS", 2)
    answers: list[Exception | None] = [StoreUnavailable("away"), None, None]

    def undo() -> None:
        if answers and (error := answers.pop(0)):
            raise error

    heartbeat.finish_later(undo)
    heartbeat.finish()
    assert not answers
    wait_for(lambda: not heartbeat._given_up, what="the last look")


def test_an_undo_that_cannot_help_is_dropped(
    heartbeat: Heartbeat, caplog: pytest.LogCaptureFixture
) -> None:
    def undo() -> None:
        raise StoreMisconfigured("no rights")

    heartbeat.finish_later(undo)
    wait_for(lambda: not heartbeat._given_up, what="the end of it")
    assert "is left alone: no rights" in caplog.text
