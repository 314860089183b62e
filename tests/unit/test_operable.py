"""Operations in code: `task.idempotency_release`, `_requeue` and `_fail`, as `_forget` does them."""

from __future__ import annotations

import pytest

from celery_idempotent import InProgress
from celery_idempotent.records import State
from celery_idempotent.stores.memory import MemoryStore
from tests.support.admin import TASK, claim, identity, make_app, settle


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def task(store):
    return make_app(store).tasks[TASK]


def test_a_stale_claim_is_released(store, task):
    claim(store, "stale", lease_ms=-1)
    assert task.idempotency_release("stale", who="alice", reason="gone") is True
    assert store.get(identity("stale")) is None


def test_an_unfinished_key_is_failed_for_good(store, task):
    store.interrupt(identity("crashed"), token=claim(store, "crashed").token)
    assert task.idempotency_fail("crashed") is True
    assert store.get(identity("crashed")).state is State.FAILED


@pytest.mark.parametrize("operation", ["release", "requeue", "fail"])
def test_what_means_nothing_for_a_record_is_not_done(store, task, operation):
    settle(store, claim(store, "done"))
    before = store.get(identity("done"))
    assert getattr(task, f"idempotency_{operation}")("done") is False
    assert getattr(task, f"idempotency_{operation}")("nothing") is False
    assert store.get(identity("done")) == before


@pytest.mark.parametrize("operation", ["release", "requeue", "fail"])
def test_a_live_owner_keeps_its_key_unless_forced_with_a_reason(store, task, operation):
    claim(store, "busy", message=b"", on_stale="requeue")
    operate = getattr(task, f"idempotency_{operation}")
    with pytest.raises(InProgress, match=operation):
        operate("busy")
    with pytest.raises(ValueError, match="say why"):
        operate("busy", force=True)
    assert operate("busy", force=True, reason="it hangs") is True
    found = store.get(identity("busy"))
    assert found is None or found.state is not State.PROCESSING
