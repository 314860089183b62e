"""Operations in code: `task.idempotency_release` and its sisters."""

from __future__ import annotations

from functools import partial

import pytest

from celery_idempotent import InProgress
from celery_idempotent.records import State
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.support.admin import TASK, claim, identity, make_app, settle


@pytest.fixture
def task(store):
    return make_app(store).tasks[TASK]


@pytest.mark.parametrize("operation", ["release", "requeue", "fail"])
def test_what_means_nothing_for_a_record_is_not_done(store, task, operation):
    settle(store, claim(store, "done"))
    before = store.get(identity("done"))
    assert getattr(task, f"idempotency_{operation}")("done") is False
    assert getattr(task, f"idempotency_{operation}")("nothing") is False
    assert store.get(identity("done")) == before


@pytest.mark.parametrize("operation", ["release", "requeue", "fail", "forget", "complete"])
def test_a_live_owner_keeps_its_key_unless_forced_with_a_reason(store, task, operation):
    claim(store, "busy", message=b"", on_stale="requeue")
    value = (17,) if operation == "complete" else ()
    operate = partial(getattr(task, f"idempotency_{operation}"), "busy", *value)
    with pytest.raises(InProgress, match=operation):
        operate()
    with pytest.raises(ValueError, match="say why"):
        operate(force=True)
    assert operate(force=True, reason="it hangs") is True
    found = store.get(identity("busy"))
    assert found is None or found.state is not State.PROCESSING


def test_a_reason_forges_no_line(store, task, caplog):
    store.interrupt(identity("crashed"), token=claim(store, "crashed").token)
    assert task.idempotency_fail("crashed", who="bob", reason="x\nERROR paid\x1b[2K" + "y" * 999)
    note = store.get(identity("crashed")).note
    assert note.startswith(r"fail by bob: x\nERROR paid\x1b[2Kyyy")
    assert len(note) == 600
    (told,) = [each for each in caplog.messages if "bob failed" in each]
    assert r"x\nERROR paid\x1b[2K" in told
    assert told.isprintable()


def answer(task, key):
    return task.apply((key,), throw=True).get()


def interrupted(store, key, **more):
    record = claim(store, key, fingerprint=None, **more)
    return store.interrupt(record.identity, token=record.token)


class TestComplete:
    def test_whoever_asks_again_gets_the_value_and_the_record_keeps_who_and_why(self, store, task):
        interrupted(store, "paid")
        value = {"charge": "ch_17", "at": None}
        assert task.idempotency_complete("paid", value, who="alice", reason="ticket 47") is True
        assert answer(task, "paid") == value
        found = task.idempotency_record("paid")
        assert (found.state, found.attempts) == (State.COMPLETED, 1)
        assert found.settled_by_operator
        assert found.note == "complete by alice: ticket 47"

    def test_what_is_completed_stays_as_it_is_unless_forced(self, store, task):
        assert answer(task, "done") == 0
        with pytest.raises(ValueError, match="callers may have got"):
            task.idempotency_complete("done", 17)
        assert task.idempotency_complete("nothing", 17) is False
        assert answer(task, "done") == 0
        assert task.idempotency_complete("done", 17, force=True, reason="typo")
        assert answer(task, "done") == 17

    @pytest.mark.parametrize(
        ("value", "problem"), [(object(), "cannot be written"), ("x" * 1001, "1,000 are allowed")]
    )
    def test_a_value_that_the_task_could_not_return_is_refused(self, store, value, problem):
        task = make_app(store, idempotency_max_result_bytes=1000).tasks[TASK]
        before = interrupted(store, "paid")
        with pytest.raises(ValueError, match=problem):
            task.idempotency_complete("paid", value)
        assert store.get(identity("paid")) == before

    def test_it_is_kept_also_where_the_task_keeps_no_results(self, store):
        task = make_app(store, idempotency_store_result=False).tasks[TASK]
        interrupted(store, "paid")
        assert task.idempotency_complete("paid", 17)
        assert answer(task, "paid") == 17

    def test_what_is_published_once_gets_it_whether_or_not_the_first_message_comes_back(
        self, store
    ):
        task = make_app(store, idempotency_publish_once=True).tasks[TASK]
        first = message_of(task, ("o",), {})
        assert task.idempotency_complete("o", 17, who="alice")
        # Nobody may ever store a result under the first task's id.
        second = message_of(task, ("o",), {})
        assert second.headers["id"] != first.headers["id"]
        assert deliver_message(task, second).value == deliver_message(task, first).value == 17
