"""The contract of `checkpoint`: what a run has done stays done in the next one."""

from __future__ import annotations

import pytest

from celery_idempotent.records import Record, Stored
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
