"""The contract of how a claim goes on and ends: renewals, steps, releases, settles, and never those of another."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import (
    Claimed,
    Record,
    Renewal,
    State,
    Stored,
)
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    KEY,
    MESSAGE,
    NAMES,
    Advance,
    ContractBase,
    all_at_once,
    crowd,
)

ANOTHER_VALUE = Stored(
    content_type="application/json", content_encoding="utf-8", body=b'{"paid": false}'
)


def result(text: str) -> Stored:
    """Return the result of a step."""
    return Stored(content_type="application/json", content_encoding="utf-8", body=text.encode())


STEPS = (("pay", result("1")), ("ship", result("2")), ("mail", result("3")))


class EndingContract(ContractBase):
    """Settling, and who may do so."""

    def test_an_operator_completes_what_failed(self, store: Store) -> None:
        """With that it leaves the list of failures, which is an index in some stores."""
        assert self.settle(store, self.claim(store), State.FAILED)
        failed = self.found(store)
        assert self.settle(store, failed, restore=False)
        found = self.found(store)
        assert (found.state, found.token > failed.token) == (State.COMPLETED, True)
        assert store.stats().failed == 0

    @pytest.mark.parametrize("end", ["settle", "release"])
    def test_an_ended_claim_is_not_swept(self, store: Store, advance: Advance, end: str) -> None:
        """Its lease is past, too: an index of leases must lose the key, or a sweep would count a crash."""
        record = self.claim(store)
        if end == "settle":
            assert self.settle(store, record, keep_ms=2 * self.lease_ms)
        else:
            assert store.release(KEY, token=record.token)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).interrupted == ()

    def test_of_a_settle_and_a_takeover_at_once_one_wins(
        self, store: Store, advance: Advance
    ) -> None:
        """Both look at a stale record. If both succeeded, the effect would happen twice with a result recorded for the
        first.
        """
        with crowd(2) as together:
            for name in NAMES[:20]:
                zombie = self.claim(store, name)
                advance(self.lease_ms + 1)

                def do(who: int, zombie: Record = zombie) -> object:
                    if who:
                        return self.settle(store, zombie)
                    return self.try_claim(store, zombie.identity)

                claimed, settled = together(do)
                assert isinstance(claimed, Claimed) is not settled

    def test_each_lease_is_answered_in_its_place(self, store: Store) -> None:
        """The heartbeat renews all claims of a process in one call. A claim that takes another one's answer is lost, or
        is believed to live, by mistake.
        """
        names = [dataclasses.replace(KEY, key=f"order-{n}") for n in range(40)]
        leases: list[Renewal] = []
        for n, name in enumerate(names):
            record = self.claim(store, name)
            leases.append(self.lease(record, token=record.token + n % 2))
        others = [store.get(name) for name in names[1::2]]
        assert store.renew(leases) == [True, False] * 20
        assert store.renew(leases) == [True, False] * 20
        assert [store.get(name) for name in names[1::2]] == others

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
