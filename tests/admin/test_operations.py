"""Operations do what they say to the very record that was seen, for those who may, and leave a note of who and why."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from celery.signals import before_task_publish
from django.test import Client

from celery_idempotent import FailedByOperator
from celery_idempotent.records import Record, State
from celery_idempotent.stores import Store
from tests.admin.pages import LIST, address, fields, text
from tests.support.admin import TASK, claim, identity
from tests.support.waiting import wait_for

Serve = Callable[..., Any]
OPERATIONS = ("release", "requeue", "complete", "fail", "forget")


def message_of(app: Any, key: str) -> bytes:
    """What a sweep would publish again."""
    task = app.tasks[TASK]
    found = task.idempotency_definition().codec.dump_message(task.s(key).set(task_id="task-1"))
    assert isinstance(found, bytes)
    return found


@pytest.fixture
def published() -> Any:
    """The task ids that are published meanwhile."""
    found: list[str] = []

    def note(headers: Any = None, **_: Any) -> None:
        found.append(headers["id"])

    before_task_publish.connect(note, weak=False)
    yield found
    before_task_publish.disconnect(note)


def entries() -> list[tuple[str, int, str]]:
    from django.contrib.admin.models import LogEntry

    found = LogEntry.objects.order_by("pk")
    return [(each.object_repr, each.action_flag, each.change_message) for each in found]


def stale(store: Store, key: str, **more: Any) -> Record:
    """A claim whose lease ran out."""
    record = claim(store, key, lease_ms=1, **more)
    wait_for(lambda: store.stats().stale, what="a lease that ran out")
    return record


def confirm(browser: Client, key: str, operation: str, **given: Any) -> Any:
    """Look at the page that asks, and say yes."""
    page = browser.get(address(key, operation))
    assert page.status_code == 200, text(page)
    return browser.post(address(key, operation), {**fields(page), **given})


def test_a_stale_claim_is_released(store: Store, serve: Serve, operator: Client) -> None:
    serve(store)
    stale(store, "a")
    answer = confirm(operator, "a", "release", reason="its host is gone")
    assert answer.status_code == 302
    assert store.get(identity("a")) is None
    assert entries() == [(f"{TASK} key a", 2, "Released. Reason: its host is gone")]
    gone = operator.get(answer["Location"])
    assert gone.status_code == 404
    assert f"Released: {TASK} key a." in text(gone)
    assert "Released. Reason: its host is gone" in text(gone)


def test_an_unfinished_record_is_failed_and_its_duplicates_get_the_error(
    store: Store, serve: Serve, operator: Client
) -> None:
    app = serve(store)
    stale(store, "a", fingerprint=None)
    confirm(operator, "a", "fail")
    record = store.get(identity("a"))
    assert record is not None
    assert record.state is State.FAILED
    error = app.tasks[TASK].idempotency_definition().codec.load_error(record.value)
    assert isinstance(error, FailedByOperator)
    with pytest.raises(FailedByOperator):
        app.tasks[TASK].apply(("a",), throw=True).get()
    assert "FailedByOperator" in text(operator.get(address("a")))


def test_a_key_is_completed_with_a_value_and_its_page_says_who_and_why(
    store: Store, serve: Serve, operator: Client
) -> None:
    app = serve(store)
    stale(store, "a", fingerprint=None)
    for wrong, problem in {"": "required", "ch_17": "is no JSON", '"x': "is no JSON"}.items():
        answer = confirm(operator, "a", "complete", value=wrong)
        assert answer.status_code == 400
        assert problem in text(answer)
    assert entries() == []
    answer = confirm(operator, "a", "complete", value='"ch_17"', reason="the bank has it")
    assert answer.status_code == 302
    assert app.tasks[TASK].apply(("a",), throw=True).get() == "ch_17"
    assert entries() == [(f"{TASK} key a", 2, "Completed. Reason: the bank has it")]
    page = text(operator.get(address("a")))
    assert "completed it with a value" in page
    assert ": the bank has it" in page
    assert address("a", "complete") not in page
    # Nobody gets another value than those before.
    answer = operator.get(address("a", "complete"))
    assert "Nothing was done" in text(operator.get(answer["Location"]))


def test_what_was_interrupted_is_requeued_under_its_task_id(
    store: Store, serve: Serve, operator: Client, published: list[str]
) -> None:
    app = serve(store)
    record = claim(store, "a", message=message_of(app, "a"), task_id="task-1")
    store.interrupt(record.identity, token=record.token)
    confirm(operator, "a", "requeue")
    found = store.get(identity("a"))
    assert found is not None
    assert (found.state, found.crashes) == (State.QUEUED, 1)
    assert published == ["task-1"]
    assert entries() == [(f"{TASK} key a", 2, "Requeued. Reason: a test")]


def test_a_message_that_cannot_be_published_stays_queued_and_the_operator_is_told(
    memory: Store, serve: Serve, operator: Client
) -> None:
    serve(memory)
    record = claim(memory, "a", message=b"application/x-python-serialize\nbinary\nnothing")
    memory.interrupt(record.identity, token=record.token)
    answer = confirm(operator, "a", "requeue")
    assert "not published yet" in text(operator.get(answer["Location"]))
    assert "not published yet" in entries()[0][2]


def test_each_operation_needs_its_own_permission(
    memory: Store, serve: Serve, log_in: Callable[..., Client]
) -> None:
    app = serve(memory)
    record = claim(memory, "a", message=message_of(app, "a"))
    memory.interrupt(record.identity, token=record.token)
    claim(memory, "b")
    offered = {"a": ("requeue", "complete", "fail", "forget"), "b": ("release",)}
    for may in (*OPERATIONS, "nothing"):
        browser = log_in("view_idempotencyrecord", f"{may}_record")
        for key, operations in offered.items():
            page = browser.get(address(key))
            for operation in operations:
                allowed = operation == may
                assert (address(key, operation) in page.content.decode()) is allowed
                assert browser.get(address(key, operation)).status_code == (200 if allowed else 403)
                if not allowed:
                    given = {"token": str(record.token), "state": "INTERRUPTED"}
                    assert browser.post(address(key, operation), given).status_code == 403
    assert memory.get(identity("a")) is not None


def test_without_the_view_permission_no_page_is_shown(
    memory: Store, serve: Serve, log_in: Callable[..., Client]
) -> None:
    serve(memory)
    claim(memory, "a")
    pages = [LIST, f"{LIST}charts/", f"{LIST}bulk/", address("a")]
    pages += [address("a", operation) for operation in OPERATIONS]
    stranger = log_in("release_record", "forget_record", "view_result")
    for page, (browser, status) in itertools.product(
        pages, [(stranger, 403), (Client(SERVER_NAME="localhost"), 302)]
    ):
        assert browser.get(page).status_code == status, page
    assert "Idempotency" not in text(stranger.get("/admin/"))
