"""The message that a FAILED record keeps is the one that ran: a person runs it again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from time import sleep
from typing import Any

import pytest

from celery_idempotent import IdempotentTask
from celery_idempotent.celery.operations import OperationRequest, Outcome, operate
from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, State
from celery_idempotent.testing import deliver
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.stores import verbs

NEWEST = {"publish_once": "until_start", "on_duplicate": "replace"}


class Refused(Exception):
    """For good."""


@pytest.fixture
def define(app: Any) -> Callable[..., Any]:
    """Define a task of a body, which keeps its message, with these options of ours."""

    def define(body: Callable[..., Any], **options: Any) -> Any:
        given = {"key": "key", "keep_message": True, "permanent_errors": (Refused,), **options}
        ours = {f"idempotency_{name}": value for name, value in given.items()}
        return app.task(base=IdempotentTask, name="charge", **ours)(body)

    return define


def kept(task: Any) -> Any:
    records = [each.record for each in task.app.conf.idempotency_store.records.values()]
    (record,) = [each for each in records if each.state is State.FAILED]
    return record.message and task._definition.codec.load_message(record.message)


def charge(key: str, number: int = 0) -> None:
    raise Refused("x" * 2000)


def test_a_body_that_changes_its_arguments_changes_no_kept_message(define):
    def charge(key: str, order: dict[str, Any]) -> None:
        order.pop("amount")
        order["secret"] = "4111"
        raise Refused

    task = define(charge)
    deliver(task, "17", {"amount": 17})
    assert [*kept(task).args] == ["17", {"amount": 17}]


@pytest.mark.parametrize("on_stale", ["interrupt", "requeue"])
def test_the_newest_arguments_are_kept(define, on_stale):
    task = define(charge, on_stale=on_stale, **NEWEST)
    message = message_of(task, ("17", 1), {})
    task.delay("17", 2)
    deliver_message(task, message)
    assert [*kept(task).args] == ["17", 2]


def test_an_error_that_cannot_be_stored_loses_no_message(define):
    task = define(charge, max_result_bytes=1000)
    deliver(task, "17")
    assert kept(task) is not None


def test_a_message_that_the_store_refuses_is_left_out(define, store, monkeypatch):
    settle = store.settle

    def small(request: Any) -> bool:
        if request.message is not None:
            raise StoreMisconfigured("message takes more than half of max_allowed_packet")
        return bool(settle(request))

    monkeypatch.setattr(store, "settle", small)
    task = define(charge, lease=1)
    deliver(task, "17")
    assert kept(task) is None


def test_the_newest_arguments_are_kept_of_a_call_that_is_not_run_again(define, store):
    def charge(key: str, number: int) -> None:
        raise SystemExit  # with a step: INTERRUPTED, as after a crash

    task = define(charge, max_crashes=0, lease=1, **NEWEST)
    message = message_of(task, ("17", 1), {})
    task.delay("17", 2)
    with pytest.raises(SystemExit):
        deliver_message(task, message)
    identity = task.idempotency_record(key="17").identity
    stored = store.records[identity]
    store.records[identity] = stored._replace(record=replace(stored.record, crashes=1))
    deliver_message(task, message)
    assert [*kept(task).args] == ["17", 2]


def test_a_call_that_fails_for_good_meanwhile_is_not_run_again(define, app, store, monkeypatch):
    """As the operator saw it, its worker was lost, and its crashes counted."""
    define(charge, keep_message=False, on_stale="requeue")
    identity = Identity(namespace="charge", key='"17"')
    record = verbs.claim(store, identity, message=b"{}", on_stale="requeue", lease_ms=1)
    sleep(0.01)  # and it is frozen
    requeue = store.requeue

    def late(*args: Any, **kwargs: Any) -> Any:
        assert verbs.settle(store, record, State.FAILED, message=b"{}")
        return requeue(*args, **kwargs)

    monkeypatch.setattr(store, "requeue", late)
    request = OperationRequest("requeue", who="alice")
    seen = {"token": record.token, "state": State.PROCESSING}
    assert operate(app, identity, request, **seen) is Outcome.CHANGED
    assert store.get(identity).state is State.FAILED
