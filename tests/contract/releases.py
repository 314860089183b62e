"""The contract of `release` and `interrupt`: how a key is given back without an end."""

from __future__ import annotations

import dataclasses

from celery_idempotent.records import State
from celery_idempotent.stores.base import Store
from tests.contract.base import KEY, Advance, ContractBase


class ReleaseContract(ContractBase):
    """Releasing, for good or for a retry, and interrupting."""

    def test_a_released_key_is_not_swept(self, store: Store, advance: Advance) -> None:
        """An index of leases must lose the key, or a sweep would count a crash of a run that failed properly."""
        store.release(KEY, token=self.claim(store).token)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).interrupted == ()

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

    def test_an_interrupted_record_is_not_swept_again(self, store: Store, advance: Advance) -> None:
        store.interrupt(KEY, token=self.claim(store).token)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).interrupted == ()

    def test_a_key_without_reservation_and_message_is_free_for_its_retry(
        self, store: Store
    ) -> None:
        """Nothing waits for this key and nothing could be sent for it, so no record is needed: the retry claims it
        afresh.
        """
        record = self.claim(store)
        assert store.release(KEY, token=record.token, requeue_ms=1000) is True
        assert store.get(KEY) is None
