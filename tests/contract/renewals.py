"""The contract of `renew`: how a claim stays alive."""

from __future__ import annotations

import dataclasses

from celery_idempotent.records import Held, Renewal
from celery_idempotent.stores.base import Store
from tests.contract.base import KEY, Advance, ContractBase


class RenewalContract(ContractBase):
    """Renewals."""

    def test_a_renewed_lease_starts_anew(self, store: Store, advance: Advance) -> None:
        record = self.claim(store)
        for _ in range(3):
            advance(self.lease_ms * 0.75)
            assert self.renew(store, record)
        found = store.get(KEY)
        assert found is not None
        assert found.deadline_ms is not None
        assert record.deadline_ms is not None
        assert found.deadline_ms > record.deadline_ms + self.lease_ms
        assert dataclasses.replace(found, deadline_ms=record.deadline_ms) == record
        assert isinstance(self.try_claim(store), Held)

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

    def test_nothing_is_renewed_by_no_leases(self, store: Store) -> None:
        assert store.renew([]) == []

    def test_what_is_gone_is_not_renewed(self, store: Store, advance: Advance) -> None:
        """A renewal must not create a record: the key is free, and another worker may be about to claim it."""
        record = self.claim(store)
        advance(self.lease_ms + self.keep_ms + 1)
        assert not self.renew(store, record)
        record = self.claim(store)
        store.forget(KEY)
        assert not self.renew(store, record)
        assert store.get(KEY) is None
