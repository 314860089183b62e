"""The message that a FAILED record keeps is the one that ran: a person runs it again."""

from __future__ import annotations

from dataclasses import replace
from time import sleep
from typing import Any

import pytest
from celery import Celery

from celery_idempotent import IdempotentTask
from celery_idempotent.celery.operations import OperationRequest, Outcome, operate
from celery_idempotent.records import Identity, State
from celery_idempotent.testing import deliver
from celery_idempotent.testing.delivery import deliver_message, message_of
from tests.stores import verbs


class Refused(Exception):
    """For good."""


def kept(app: Celery, task: Any) -> Any:
    records = [each.record for each in app.conf.idempotency_store.records.values()]
    (record,) = [each for each in records if each.state is State.FAILED]
    return record.message and task._definition.codec.load_message(record.message)


def test_a_body_that_changes_its_arguments_changes_no_kept_message(app):
    @app.task(
        base=IdempotentTask,
        name="charge",
        idempotency_key="key",
        idempotency_keep_message=True,
        idempotency_permanent_errors=(Refused,),
    )
    def charge(key: str, order: dict[str, Any]) -> None:
        order.pop("amount")
        order["secret"] = "4111"
        raise Refused

    deliver(charge, "17", {"amount": 17})
    again = kept(app, charge)
    assert [*again.args] == ["17", {"amount": 17}]


@pytest.mark.parametrize("on_stale", ["interrupt", "requeue"])
def test_the_newest_arguments_are_kept(app, on_stale):
    ran = []

    @app.task(
        base=IdempotentTask,
        name="index",
        idempotency_key="key",
        idempotency_keep_message=True,
        idempotency_publish_once="until_start",
        idempotency_on_duplicate="replace",
        idempotency_permanent_errors=(Refused,),
        idempotency_on_stale=on_stale,
    )
    def index(key: str, number: int) -> None:
        ran.append(number)
        raise Refused

    message = message_of(index, ("17", 1), {})
    index.delay("17", 2)
    deliver_message(index, message)
    assert ran == [2]
    assert [*kept(app, index).args] == ["17", 2]


def test_an_error_that_cannot_be_stored_loses_no_message(app):
    @app.task(
        base=IdempotentTask,
        name="charge",
        idempotency_key="key",
        idempotency_keep_message=True,
        idempotency_permanent_errors=(Refused,),
        idempotency_max_result_bytes=1000,
    )
    def charge(key: str) -> None:
        raise Refused("x" * 2000)

    deliver(charge, "17")
    assert kept(app, charge) is not None


def test_a_message_that_the_store_refuses_is_left_out(app, store, monkeypatch):
    from celery_idempotent.errors import StoreMisconfigured

    @app.task(
        base=IdempotentTask,
        name="charge",
        idempotency_key="key",
        idempotency_keep_message=True,
        idempotency_permanent_errors=(Refused,),
        idempotency_lease=1,
    )
    def charge(key: str) -> None:
        raise Refused

    settle = store.settle

    def small(request: Any) -> bool:
        if request.message is not None:
            raise StoreMisconfigured("message takes more than half of max_allowed_packet")
        return bool(settle(request))

    monkeypatch.setattr(store, "settle", small)
    deliver(charge, "17")
    assert kept(app, charge) is None


def test_the_newest_arguments_are_kept_of_a_call_that_is_not_run_again(app, store):
    @app.task(
        base=IdempotentTask,
        name="index",
        idempotency_key="key",
        idempotency_keep_message=True,
        idempotency_publish_once="until_start",
        idempotency_on_duplicate="replace",
        idempotency_max_crashes=0,
        idempotency_lease=1,
    )
    def index(key: str, number: int) -> None:
        raise SystemExit  # with a step: INTERRUPTED, as after a crash

    message = message_of(index, ("17", 1), {})
    index.delay("17", 2)
    with pytest.raises(SystemExit):
        deliver_message(index, message)
    identity = index.idempotency_record(key="17").identity
    stored = store.records[identity]
    store.records[identity] = stored._replace(record=replace(stored.record, crashes=1))
    deliver_message(index, message)
    assert [*kept(app, index).args] == ["17", 2]


def test_a_call_that_fails_for_good_meanwhile_is_not_run_again(app, store, monkeypatch):
    """As the operator saw it, its worker was lost, and its crashes counted."""

    @app.task(
        base=IdempotentTask,
        name="charge",
        idempotency_key="key",
        idempotency_on_stale="requeue",
    )
    def charge(key: str) -> None: ...

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
