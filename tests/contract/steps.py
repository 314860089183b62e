"""The contract of `checkpoint`: what a run has done stays done in the next one."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import Record, State, Stored
from celery_idempotent.stores.base import Store
from tests.contract.base import KEY, MESSAGE, Advance, ContractBase, all_at_once


def result(text: str) -> Stored:
    """Return the result of a step."""
    return Stored(content_type="application/json", content_encoding="utf-8", body=text.encode())


STEPS = (("pay", result("1")), ("ship", result("2")), ("mail", result("3")))


class StepContract(ContractBase):
    """Checkpoints."""

    def test_steps_stay_in_their_order(self, store: Store) -> None:
        record = self.with_steps(store)
        assert record.steps == STEPS
        assert store.get(KEY) == record

    def test_a_step_keeps_its_first_result(self, store: Store) -> None:
        """The first answer may have been lost after the write, and the outside system has seen that result."""
        record = self.with_steps(store)
        assert store.checkpoint(KEY, token=record.token, name="pay", value=result("9")) is True
        assert store.get(KEY) == record

    @pytest.mark.parametrize("body", [b"", b"S\0\0\0\1M", bytes(range(256)), b"x" * 1024 * 1024])
    def test_any_step_comes_back_as_it_was(self, store: Store, body: bytes) -> None:
        token = self.claim(store, message=MESSAGE).token
        values = [
            Stored(content_type="application/x-python-serialize", content_encoding="binary", body=b)
            for b in (body, b"", body)
        ]
        for name, value in zip(("", "p", "\u20ac" * 100), values, strict=True):
            assert store.checkpoint(KEY, token=token, name=name, value=value)
        found = self.found(store)
        assert [value for _, value in found.steps] == values
        assert [name for name, _ in found.steps] == ["", "p", "\u20ac" * 100]
        assert found.message == MESSAGE

    def test_a_step_changes_nothing_else(self, store: Store, advance: Advance) -> None:
        """A checkpoint neither renews the lease nor prolongs the record: it may come from a claim that is about to be
        lost.
        """
        record = self.claim(store, on_stale="fail", message=MESSAGE)
        advance(self.lease_ms / 2)
        assert store.checkpoint(KEY, token=record.token, name="pay", value=result("1"))
        assert store.get(KEY) == dataclasses.replace(record, steps=STEPS[:1])
        advance(self.lease_ms / 2 + 1)
        assert store.checkpoint(KEY, token=record.token, name="ship", value=result("2"))
        advance(self.keep_ms)
        assert store.get(KEY) is None
        assert store.checkpoint(KEY, token=record.token, name="pay", value=result("1")) is False

    @pytest.mark.parametrize("state", ["QUEUED", "INTERRUPTED", "COMPLETED", "FAILED"])
    def test_only_the_run_that_holds_the_key_makes_a_step(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """Whoever has given the key back must not add to what the next run will believe."""
        record = self.bring_to(store, advance, state)
        assert store.checkpoint(KEY, token=record.token, name="pay", value=result("1")) is False
        assert store.get(KEY) == record

    def test_another_token_makes_no_step(self, store: Store) -> None:
        record = self.claim(store)
        assert store.checkpoint(KEY, token=record.token + 1, name="p", value=result("1")) is False
        assert store.get(KEY) == record

    def test_steps_survive_a_crash(self, store: Store, advance: Advance) -> None:
        """What is done is not done again.

        ::

            run 1   step "pay" ─ checkpoint ─ ✗ killed
            run 2                                claim: has "pay" ─ does not pay again ─ step "ship"
        """
        first = self.with_steps(store)
        swept = store.interrupt(KEY, token=first.token)
        assert swept is not None
        assert swept.steps == STEPS
        second = self.claim(store, message=b"another")
        assert (second.steps, second.message) == (STEPS, b"another")
        assert store.checkpoint(KEY, token=first.token, name="late", value=result("4")) is False
        assert store.checkpoint(KEY, token=second.token, name="more", value=result("4"))
        advance(self.lease_ms + 1)
        assert self.claim(store).steps == (*STEPS, ("more", result("4")))
        assert store.get(KEY) is not None

    def test_steps_survive_a_renewal_and_a_claim_repeated(self, store: Store) -> None:
        """A store that writes the record anew at a renewal may lose what was added since it was read."""
        record = self.with_steps(store, attempt=b"12345678")
        assert self.renew(store, record)
        assert self.claim(store, attempt=b"12345678").steps == STEPS

    @pytest.mark.parametrize("requeue_ms", [None, 1000])
    def test_a_released_record_with_steps_is_interrupted_without_a_crash(
        self, store: Store, advance: Advance, requeue_ms: int | None
    ) -> None:
        """The run failed, it did not crash. The record stays for its steps, so that the next attempt does not repeat
        them.
        """
        record = self.with_steps(store)
        advance(10)
        assert store.release(KEY, token=record.token, requeue_ms=requeue_ms) is True
        found = self.found(store)
        assert found.updated_ms > record.updated_ms
        assert found == dataclasses.replace(
            record, state=State.INTERRUPTED, updated_ms=found.updated_ms, deadline_ms=None
        )
        assert store.release(KEY, token=record.token) is False
        advance(self.lease_ms + 1)
        report = store.sweep(limit=10)
        assert report.interrupted + report.requeued == ()
        again = self.claim(store)
        assert (again.steps, again.crashes, again.attempts) == (STEPS, 0, 2)

    def test_a_released_record_with_steps_lives_as_long_as_it_would_have(
        self, store: Store, advance: Advance
    ) -> None:
        record = self.with_steps(store)
        advance(self.lease_ms)
        store.release(KEY, token=record.token)
        advance(self.keep_ms / 2)
        assert store.get(KEY) is not None
        advance(self.keep_ms / 2 + 1)
        assert store.get(KEY) is None

    def test_a_retry_of_a_reserved_run_keeps_its_steps(self, store: Store) -> None:
        """Released for a retry it is QUEUED, given up after that it is INTERRUPTED: the steps have happened in either
        case.
        """
        self.reserve(store)
        record = self.with_steps(store)
        assert store.release(KEY, token=record.token, requeue_ms=1000)
        found = self.found(store)
        assert (found.state, found.steps) == (State.QUEUED, STEPS)
        assert store.release(KEY, token=record.token)
        found = self.found(store)
        assert (found.state, found.steps, found.crashes) == (State.INTERRUPTED, STEPS, 0)
        assert self.claim(store).steps == STEPS

    def test_steps_at_once_are_all_kept(self, store: Store) -> None:
        """A body may take its steps in threads. A store that reads all steps and writes them back would lose some."""
        token = self.claim(store).token

        def do(n: int) -> bool:
            return store.checkpoint(KEY, token=token, name=f"{n % 10}", value=result(f"{n}"))

        assert all(all_at_once(30, do))
        steps = self.found(store).steps
        assert sorted(name for name, _ in steps) == [f"{n}" for n in range(10)]

    def with_steps(self, store: Store, **changes: object) -> Record:
        """Claim the key and take all steps; return the record."""
        token = self.claim(store, **changes).token
        for name, value in STEPS:
            assert store.checkpoint(KEY, token=token, name=name, value=value) is True
        return self.found(store)
