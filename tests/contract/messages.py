"""The contract of a reservation's message: who brings it, and when a sweep sends it."""

from __future__ import annotations

import dataclasses

from celery_idempotent.records import Held
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    KEY,
    MESSAGE,
    TASK_ID,
    Advance,
    ContractBase,
)


class MessageContract(ContractBase):
    """A reservation with a message, and one without."""

    def test_the_message_of_a_reservation_is_requeued_past_its_deadline_until_it_is_claimed(
        self, store: Store, advance: Advance
    ) -> None:
        """The broker may never have got it; once a worker has claimed the key, it has.

        ::

            publisher   reserve, with its message ─ ✗ killed before it was sent
            sweep                                      the deadline passes ─ sends it ─ … twice as long ─ sends it again
            worker                                                                             claim: no more copies
        """
        record = self.reserve(store, message=MESSAGE)
        assert record.message == MESSAGE
        assert store.get(KEY) == record
        assert store.sweep(limit=10, requeue_ms=self.lease_ms).requeued == ()
        assert isinstance(self.try_reserve(store, task_id="another", message=b"mine"), Held)
        for waited in (self.lease_ms, 2 * self.lease_ms):
            assert record.deadline_ms is not None
            advance(record.deadline_ms - store.now_ms() + 1)
            (swept,) = store.sweep(limit=10, requeue_ms=self.lease_ms).requeued
            assert swept.deadline_ms is not None
            assert swept.deadline_ms - record.deadline_ms >= waited
            # No crash: it was never claimed.
            assert swept == dataclasses.replace(record, deadline_ms=swept.deadline_ms)
            assert store.get(KEY) == swept
            record = swept
        claimed = self.claim(store)
        assert (claimed.message, claimed.crashes, claimed.reserved) == (None, 0, True)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).requeued == ()

    def test_who_takes_a_reservation_over_brings_its_message_under_the_first_task_id(
        self, store: Store, advance: Advance
    ) -> None:
        """A message names its own task id. One for another id than the record's would be no redelivery of the first,
        which may have been sent.
        """
        self.reserve(store)
        advance(self.lease_ms + 1)
        # Of another task id: the first stays in the record.
        for _ in range(2):
            record = self.reserve(store, task_id="another", message=b"for another")
            assert (record.task_id, record.message) == (TASK_ID, None)
        assert self.reserve(store, message=MESSAGE).message == MESSAGE
        advance(self.lease_ms + 1)
        again = self.reserve(store, task_id="a third", message=b"for a third")
        assert (again.task_id, again.message) == (TASK_ID, MESSAGE)
        advance(self.lease_ms + 1)
        (swept,) = store.sweep(limit=10).requeued
        assert swept.message == MESSAGE
