"""The contract of what operators do to a record: it stays with the record, and so do who did it and why."""

from __future__ import annotations

import dataclasses

import pytest

from celery_idempotent.records import (
    EndState,
    Held,
    Intervention,
    Mismatched,
    Record,
    Settled,
    State,
    Stored,
)
from celery_idempotent.stores.base import Store
from tests.contract.base import (
    END_STATES,
    KEY,
    OTHER_FINGERPRINT,
    VALUE,
    Advance,
    ContractBase,
)

ALICE = Intervention(operation="complete", who="alice", reason="ticket 47: \u20ac 12 were paid")
BOB = Intervention(operation="fail", who="bob of the night shift")
TRUE = Stored(content_type="application/json", content_encoding="utf-8", body=b'"ch_17"')
LIVE_STATES = ("QUEUED", "PROCESSING", "STALE", "INTERRUPTED")


class InterventionContract(ContractBase):
    """Completing what failed, amending steps, and the note about it."""

    def noted(self, store: Store) -> list[Intervention]:
        """Return what the record says of operators, the latest last, without the times."""
        return [dataclasses.replace(each, at_ms=0) for each in self.found(store).interventions]

    def amend(self, store: Store, record: Record, name: str, value: Stored | None) -> bool:
        """Amend a step as alice."""
        word = "forget" if value is None else "complete"
        noted = dataclasses.replace(ALICE, operation=word, step=name)
        return store.amend(KEY, token=record.token, name=name, value=value, intervention=noted)

    @pytest.mark.parametrize("state", END_STATES)
    def test_who_settled_it_and_why_stays_with_the_record(
        self, store: Store, advance: Advance, state: EndState
    ) -> None:
        """The note is part of the answer to a duplicate; a worker that ends its run later does not replace it."""
        record = self.claim(store)
        assert isinstance(self.try_claim(store, task_id="another"), Held)
        advance(10)
        assert self.settle(store, record, state, restore=False, intervention=ALICE)
        settled = self.found(store)
        assert self.noted(store) == [ALICE]
        assert settled.settled_by is not None
        assert settled.settled_by.at_ms == settled.updated_ms
        assert store.mark_delivered(KEY, token=record.token)
        for answer in (self.try_claim(store), self.try_reserve(store, task_id="another")):
            assert isinstance(answer, Settled)
            assert answer.record.settled_by == settled.settled_by
        mismatched = self.try_claim(store, fingerprint=OTHER_FINGERPRINT, task_id="third")
        assert isinstance(mismatched, Mismatched)
        assert self.settle(store, record, state, restore=False, intervention=BOB)
        assert self.settle(store, record, state)
        found = self.found(store)
        assert found == dataclasses.replace(settled, delivered=True)
        assert (self.noted(store), len(found.refusals)) == ([ALICE], 2)

    def test_the_note_needs_no_look_before_it(self, store: Store) -> None:
        assert self.settle(store, self.claim(store), intervention=ALICE)
        assert self.noted(store) == [ALICE]

    def test_an_operator_completes_what_failed(self, store: Store, advance: Advance) -> None:
        """Only an operator who saw it FAILED may change that end: someone who saw the record at work knows nothing of
        it.
        """
        claimed = self.claim(store)
        assert self.settle(store, claimed, State.FAILED, restore=False, intervention=BOB)
        assert store.mark_delivered(KEY, token=claimed.token)
        advance(self.keep_ms * 0.75)
        failed = self.found(store)
        # The first end stays for who did not see it: a late worker, or an operator who saw it at work.
        other = dataclasses.replace(failed, token=failed.token + 1)
        assert self.settle(store, other, value=TRUE, restore=False) is False
        assert self.settle(store, claimed, value=TRUE, restore=False)
        assert self.settle(store, failed, value=TRUE)
        assert self.found(store) == failed
        assert self.settle(store, failed, value=TRUE, restore=False, intervention=ALICE)
        found = self.found(store)
        assert (found.state, found.value, found.token) == (State.COMPLETED, TRUE, failed.token)
        assert found.delivered is False
        assert self.noted(store) == [BOB, ALICE]
        assert store.stats().failed == 0
        advance(self.keep_ms / 2)
        answer = self.try_claim(store)
        assert isinstance(answer, Settled)
        assert answer.record.value == TRUE
        # Once completed, that is the end.
        assert self.settle(store, failed, value=VALUE, restore=False, intervention=BOB)
        assert self.found(store) == found
        assert self.noted(store) == [BOB, ALICE]

    @pytest.mark.parametrize("state", LIVE_STATES)
    def test_an_operator_amends_the_steps_of_what_is_unfinished(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        """A live owner loses the key by that, since it has read the steps as they were before."""
        self.reserve(store)
        claimed = self.claim(store)
        for name in ("pay", "ship"):
            assert store.checkpoint(KEY, token=claimed.token, name=name, value=VALUE)
        match state:
            case "QUEUED":
                assert store.release(KEY, token=claimed.token, requeue_ms=self.lease_ms)
            case "INTERRUPTED":
                assert store.interrupt(KEY, token=claimed.token)
            case "STALE":
                advance(self.lease_ms + 1)
        before = self.found(store)
        advance(10)
        assert self.amend(store, before, "pay", TRUE)
        assert self.amend(store, before, "mail", TRUE)
        assert self.amend(store, before, "ship", None)
        assert self.amend(store, before, "none", None)
        found = self.found(store)
        taken = state in ("PROCESSING", "STALE")
        assert found == dataclasses.replace(
            before,
            state=State.INTERRUPTED if taken else before.state,
            deadline_ms=None if taken else before.deadline_ms,
            updated_ms=found.updated_ms if taken else before.updated_ms,
            steps=(("pay", TRUE), ("mail", TRUE)),
        )
        assert store.stats().interrupted == (0 if state == "QUEUED" else 1)
        assert not store.checkpoint(KEY, token=claimed.token, name="late", value=VALUE)
        assert not self.renew(store, claimed)
        noted = [(each.operation, each.step) for each in self.noted(store)]
        wanted = [("complete", "pay"), ("complete", "mail"), ("forget", "ship"), ("forget", "none")]
        assert noted == wanted
        again = self.claim(store)
        assert (again.steps, again.crashes) == (found.steps, before.crashes)
        assert self.settle(store, again)
        assert (len(self.noted(store)), self.found(store).settled_by) == (4, None)

    @pytest.mark.parametrize("state", ["COMPLETED", "FAILED"])
    def test_what_is_settled_has_no_steps_to_amend(
        self, store: Store, advance: Advance, state: str
    ) -> None:
        record = self.bring_to(store, advance, state)
        assert self.amend(store, record, "pay", TRUE) is False
        assert store.get(KEY) == record
        assert self.noted(store) == []

    def test_another_token_amends_nothing(self, store: Store) -> None:
        record = self.claim(store)
        other = dataclasses.replace(record, token=record.token + 1)
        assert self.amend(store, other, "pay", TRUE) is False
        assert store.get(KEY) == record

    def test_five_interventions_stay_beside_five_refusals(self, store: Store) -> None:
        """Each kind has a bound of its own: clients that repeat a refused call cannot push out what an operator has
        noted.
        """
        record = self.claim(store)
        for n in range(7):
            assert isinstance(self.try_claim(store, task_id=f"early-{n}"), Held)
        for n in range(7):
            assert self.amend(store, record, f"step-{n}", TRUE)
        for n in range(7):
            other = self.try_claim(store, task_id=f"late-{n}", fingerprint=OTHER_FINGERPRINT)
            assert isinstance(other, Mismatched)
        found = self.found(store)
        assert [each.step for each in found.interventions] == [f"step-{n}" for n in range(2, 7)]
        assert [each.task_id for each in found.refusals] == [f"late-{n}" for n in range(2, 7)]
        assert len(found.steps) == 7

    def test_the_same_again_is_one_intervention(self, store: Store, advance: Advance) -> None:
        """A page that is sent twice is one intervention; the same operation for another reason is another one."""
        record = self.claim(store)
        plain = dataclasses.replace(ALICE, step="pay", reason="")
        for noted in (ALICE, plain, plain, ALICE):
            noted = dataclasses.replace(noted, step="pay")
            advance(1)
            assert store.amend(KEY, token=record.token, name="pay", value=TRUE, intervention=noted)
        assert [each.reason for each in self.noted(store)] == [ALICE.reason, "", ALICE.reason]

    def test_what_is_noted_is_bounded(self, store: Store) -> None:
        """Whatever people type, the record stays small. Cut by characters: half of one would not be text any more."""
        record = self.claim(store)
        long = Intervention(operation="complete", who="w\u20ac" * 90, reason="r\u20ac" * 300)
        assert self.settle(store, record, restore=False, intervention=long)
        (found,) = self.noted(store)
        assert found == dataclasses.replace(long, who="w\u20ac" * 25, reason="r\u20ac" * 125)
        assert self.found(store).value == VALUE

    @pytest.mark.parametrize("way", ["forget", "release"])
    def test_a_new_record_of_the_key_has_no_interventions(self, store: Store, way: str) -> None:
        """What an operator did to one operation says nothing about the next one with this key."""
        record = self.claim(store)
        assert self.amend(store, record, "pay", TRUE)
        assert self.amend(store, record, "pay", None)
        if way == "release":
            assert store.release(KEY, token=self.claim(store).token)
        else:
            assert store.forget(KEY)
        self.claim(store)
        assert self.noted(store) == []
