"""The contract of `settle` and `mark_delivered`: how a claim ends, and never another's."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import Claimed, EndState, Record, Settled, State, Stored
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    END_STATES,
    FINGERPRINT,
    KEY,
    NAMES,
    TASK_ID,
    VALUE,
    Advance,
    ContractBase,
    crowd,
)

ANOTHER_VALUE = Stored(
    content_type="application/json", content_encoding="utf-8", body=b'{"paid": false}'
)


class EndingContract(ContractBase):
    """Settling, and who may do so."""

    @pytest.mark.parametrize("fingerprint", [None, FINGERPRINT])
    @pytest.mark.parametrize("value", [None, VALUE])
    def test_a_value_need_not_be_kept(
        self, store: Store, value: Stored | None, fingerprint: bytes | None
    ) -> None:
        """``idempotency_store_result=False``, or a result that is too large: the key is done, and its result is
        elsewhere.
        """
        assert self.settle(store, self.claim(store, fingerprint=fingerprint), value=value)
        answer = self.try_claim(store)
        assert isinstance(answer, Settled)
        assert (answer.record.value, answer.record.fingerprint) == (value, fingerprint)

    def test_an_operator_completes_what_failed(self, store: Store) -> None:
        """With that it leaves the list of failures, which is an index in some stores."""
        assert self.settle(store, self.claim(store), State.FAILED)
        failed = self.found(store)
        assert self.settle(store, failed, restore=False)
        found = self.found(store)
        assert (found.state, found.token > failed.token) == (State.COMPLETED, True)
        assert store.stats().failed == 0

    @pytest.mark.parametrize("state", END_STATES)
    def test_a_settle_is_accepted_when_the_record_is_gone(
        self, store: Store, state: EndState
    ) -> None:
        """It may be gone because a store lost it, an operator forgot it or it expired. The effect has happened all the
        same, so the record is restored from what the worker knows of its claim.

        ::

            worker     claim ─ body ───────────────────── settle: restored, COMPLETED
            operator              forget: no record
            duplicate                                               claim: Settled ─ replay
        """
        record = self.claim(store)
        store.forget(KEY)
        assert self.settle(store, record, state)
        found = store.get(KEY)
        assert found is not None
        assert (found.state, found.value, found.token) == (state, VALUE, record.token)
        assert (found.created_ms, found.task_id) == (record.created_ms, TASK_ID)
        assert isinstance(self.try_claim(store), Settled)

    @pytest.mark.parametrize("state", END_STATES)
    def test_who_did_not_run_it_does_not_bring_it_back(self, store: Store, state: EndState) -> None:
        """An operator or a sweep (``restore=False``) has seen no effect. Without a record there is nothing that they
        could end.
        """
        reserved = self.reserve(store)
        claimed = self.claim(store)
        assert self.settle(store, reserved, state, restore=False) is False
        assert self.found(store) == claimed
        store.release(KEY, token=claimed.token)
        for record in (reserved, claimed):
            assert self.settle(store, record, state, restore=False) is False
            assert store.get(KEY) is None

    @pytest.mark.parametrize("state", END_STATES)
    @pytest.mark.parametrize("replaced", [True, False])
    def test_a_settled_record_is_marked_as_delivered(
        self, store: Store, state: EndState, replaced: bool
    ) -> None:
        """The mark says that the callbacks of the task are sent. A redelivery of a task with callbacks reads it."""
        record = self.claim(store)
        assert self.settle(store, record, state, replaced=replaced)
        before = self.found(store)
        assert before.delivered is False
        for _ in range(2):
            assert store.mark_delivered(KEY, token=record.token) is True
            assert store.get(KEY) == dataclasses.replace(before, delivered=True)
        assert self.settle(store, record, state)
        assert self.found(store).delivered is True

    @pytest.mark.parametrize("state", END_STATES)
    def test_a_record_past_its_retention_is_not_marked(
        self, store: Store, advance: Advance, state: EndState
    ) -> None:
        """A store whose expired records lie around for a while must not bring one back by writing to it."""
        record = self.claim(store)
        self.settle(store, record, state)
        advance(self.keep_ms + 1)
        assert store.mark_delivered(KEY, token=record.token) is False
        assert store.get(KEY) is None

    def test_a_settled_key_is_not_swept(self, store: Store, advance: Advance) -> None:
        """Its lease is past, too. An index of leases must lose a key when its claim is settled."""
        self.settle(store, self.claim(store), keep_ms=2 * self.lease_ms)
        advance(self.lease_ms + 1)
        assert store.sweep(limit=10).interrupted == ()

    @pytest.mark.parametrize("state", ["PROCESSING", "INTERRUPTED", "COMPLETED", "FAILED"])
    def test_a_zombie_is_refused_by_every_verb(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """A zombie is a worker that was frozen for longer than its lease, and does not know it. Its token is older than
        that of the record; whatever the record's state is, nothing that it asks for may be written.

        ::

            zombie     claim (token 7) ─ frozen ······················· thaws ─ settle (token 7): refused
            worker B                     the lease ends ─ claim (token 8) ─ body ─ settle: COMPLETED
        """
        zombie = self.claim(store)
        advance(self.lease_ms + 1)
        found = self.bring_to(store, advance, state)
        self._refused(store, zombie)
        assert store.get(KEY) == found

    def test_a_zombie_is_refused_after_a_forget_and_a_new_claim(self, store: Store) -> None:
        """The last token outlives the record, so that the new one is larger also after a forget."""
        zombie = self.claim(store)
        store.forget(KEY)
        found = self.claim(store)
        self._refused(store, zombie)
        assert store.get(KEY) == found

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

    def _refused(self, store: Store, zombie: Record) -> None:
        assert self.renew(store, zombie) is False
        assert self.settle(store, zombie, value=ANOTHER_VALUE) is False
        assert self.settle(store, zombie, State.FAILED, value=None) is False
        assert store.release(zombie.identity, token=zombie.token) is False
        assert store.release(zombie.identity, token=zombie.token, requeue_ms=1) is False
        assert store.interrupt(zombie.identity, token=zombie.token) is None
        assert store.mark_delivered(zombie.identity, token=zombie.token) is False
        name, token = zombie.identity, zombie.token
        assert store.checkpoint(name, token=token, name="pay", value=ANOTHER_VALUE) is False
