"""Between the look of an operation and its write the key may move on: what is there by then is left alone.

Unless it is what the operation itself left there, when its first answer was lost.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.celery.operations import (
    Operation,
    OperationRequest,
    Outcome,
    operate,
    operate_or_raise,
)
from celery_idempotent.records import Record, ReserveRequest, SettleRequest, State
from celery_idempotent.stores import Store
from tests.support.admin import claim, identity, make_user, settle, value
from tests.support.waiting import wait_for

Serve = Callable[..., Any]
KEY = identity("a")
MESSAGE = b"application/json\nutf-8\n{}"


def bring_to(store: Store, state: str) -> Record:
    """Bring the key into a state: ``"STALE"``, PROCESSING whose lease ran out; ``"STEPS"``, PROCESSING with a step."""
    if state == "QUEUED":
        store.reserve(
            ReserveRequest(identity=KEY, task_id="task-1", deadline_ms=60_000, keep_ms=60_000)
        )
    else:
        record = claim(store, KEY, lease_ms=1 if state == "STALE" else 60_000, message=MESSAGE)
        if state == "INTERRUPTED":
            store.interrupt(KEY, token=record.token)
        elif state == "STEPS":
            assert store.checkpoint(KEY, token=record.token, name="pay", value=value("17"))
        elif state in ("COMPLETED", "FAILED"):
            settle(store, record, State[state])
        elif state == "STALE":
            wait_for(lambda: store.stats().stale, what="a lease that ran out")
    found = store.get(KEY)
    assert found is not None
    return found


def claimed(store: Store, _: Record) -> None:
    claim(store, KEY)


def released(store: Store, record: Record) -> None:
    """A worker took it, and gave it back: its run failed and may be tried again."""
    if record.state is not State.PROCESSING:
        record = claim(store, KEY)
    store.release(KEY, token=record.token)


def completed(store: Store, record: Record) -> None:
    settle(store, record if record.state is State.PROCESSING else claim(store, KEY))


def outlived(store: Store, record: Record) -> None:
    """A worker took it and completed it, and its retention is over."""
    record = claim(store, KEY)
    assert store.settle(SettleRequest(record=record, state=State.COMPLETED, value=None, keep_ms=1))
    wait_for(lambda: store.get(KEY) is None, what="the end of its retention")


def failed(store: Store, record: Record) -> None:
    settle(store, record, State.FAILED)


def crashed(store: Store, _: Record) -> None:
    """A worker took it, and died."""
    store.interrupt(KEY, token=claim(store, KEY, message=MESSAGE).token)


def requeued(store: Store, _: Record) -> None:
    """A sweep let its message be sent again, which keeps the token."""
    assert store.requeue(KEY, deadline_ms=60_000)


def anew(store: Store, _: Record) -> None:
    """Somebody else forgot it, and it ran again."""
    store.forget(KEY)
    settle(store, claim(store, KEY))


@pytest.mark.parametrize(
    ("operation", "state", "meanwhile"),
    [
        ("complete", "QUEUED", claimed),
        ("complete", "INTERRUPTED", requeued),
        ("complete", "STALE", claimed),
        ("complete", "STALE", completed),
        ("complete", "STALE", failed),
        ("complete", "FAILED", anew),
        ("fail", "QUEUED", claimed),
        ("fail", "QUEUED", released),
        ("fail", "QUEUED", completed),
        ("fail", "QUEUED", outlived),
        ("fail", "INTERRUPTED", claimed),
        ("fail", "INTERRUPTED", released),
        ("fail", "STALE", claimed),
        ("fail", "STALE", released),
        ("fail", "STALE", completed),
        ("fail", "STALE", failed),
        ("fail", "STALE", requeued),
        ("fail", "INTERRUPTED", requeued),
        ("forget", "STALE", requeued),
        ("forget", "STALE", claimed),
        ("forget", "STALE", completed),
        ("forget", "INTERRUPTED", claimed),
        ("release", "QUEUED", claimed),
        ("release", "STALE", claimed),
        ("release", "STALE", completed),
        ("requeue", "INTERRUPTED", claimed),
        ("requeue", "INTERRUPTED", crashed),
        ("requeue", "STALE", claimed),
        ("requeue", "STALE", crashed),
        ("requeue", "STALE", completed),
    ],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_what_happens_between_look_and_write_stays(
    store: Store,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    operation: Any,
    state: str,
    meanwhile: Callable[[Store, Record], None],
) -> None:
    app = serve(store)
    seen = bring_to(store, state)
    look = store.get

    def looked(about: Any) -> Record | None:
        monkeypatch.setattr(store, "get", look)
        found = look(about)
        assert found == seen
        meanwhile(store, seen)
        after.append(look(about))
        return found

    after: list[Record | None] = []
    monkeypatch.setattr(store, "get", looked)
    about: dict[str, Any] = {}
    if operation == "complete":
        about["value"] = value("17")
    outcome = operate(
        app, KEY, OperationRequest(operation, **about), token=seen.token, state=seen.state
    )
    assert outcome is Outcome.CHANGED
    assert [store.get(KEY)] == after


@pytest.mark.parametrize(
    ("operation", "state", "since"),
    [("fail", "INTERRUPTED", requeued), ("forget", "STALE", completed)],
    ids=["requeued, a message is under way", "completed, under the same token"],
)
def test_what_changed_since_it_was_seen_is_left_alone(
    store: Store,
    serve: Serve,
    operation: Operation,
    state: str,
    since: Callable[[Store, Record], None],
) -> None:
    app = serve(store)
    seen = bring_to(store, state)
    since(store, seen)
    found = store.get(KEY)
    outcome = operate(app, KEY, OperationRequest(operation), token=seen.token, state=seen.state)
    assert outcome is Outcome.CHANGED
    assert store.get(KEY) == found


#: Operations that a store cannot do twice: what it finds at the second time is its own work.
ONCE = pytest.mark.parametrize(
    ("operation", "state"),
    [
        ("release", "QUEUED"),
        ("release", "PROCESSING"),
        ("release", "STEPS"),
        ("requeue", "PROCESSING"),
        ("requeue", "INTERRUPTED"),
        ("forget", "COMPLETED"),
        ("forget", "INTERRUPTED"),
    ],
)


def assert_told_as_done(app: Any, seen: Record, operation: Operation) -> None:
    """Alice does it, and is told that it is done; so says the admin's log."""
    from django.contrib.admin.models import LogEntry

    make_user("alice")
    request = OperationRequest(operation, who="alice", reason="it is stuck", force=True)
    outcome = operate(app, KEY, request, token=seen.token, state=seen.state)
    # Nobody can send this message, whatever became of the answer: it is not the app's.
    wanted = Outcome.UNSENT if operation == "requeue" else Outcome.DONE
    entries = LogEntry.objects.values_list("user__username", "change_message")
    done = {"release": "Released", "requeue": "Requeued", "forget": "Forgotten"}[operation]
    assert [(who, message.startswith(done)) for who, message in entries] == [("alice", True)]
    assert outcome is wanted


def assert_left(store: Store, operation: Operation, state: str) -> None:
    """The key is as an operation leaves it that was done."""
    found = store.get(KEY)
    if operation == "requeue":
        assert found is not None
        assert found.state is State.QUEUED
    elif state == "STEPS":
        assert found is not None
        assert found.state is State.INTERRUPTED
    else:
        assert found is None


@ONCE
def test_one_that_the_store_sent_twice_is_told_as_done(
    store: Store,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: Operation,
    state: str,
) -> None:
    """As after the COMMIT of a database whose answer is lost: the verb is done again, and finds its own work."""
    app = serve(store)
    seen = bring_to(store, state)
    verb = getattr(store, operation)

    def twice(*args: Any, **options: Any) -> Any:
        assert verb(*args, **options)
        return verb(*args, **options)

    monkeypatch.setattr(store, operation, twice)
    assert_told_as_done(app, seen, operation)
    assert_left(store, operation, state)
    if operation != "requeue":
        assert "alice " in caplog.text


def test_code_that_forgets_is_told_that_it_did_and_forgets_no_later_record(
    store: Store, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """::

    code     forget ─ deleted, and the answer is lost ─────────────── again: another token
    worker                                              claim ─ COMPLETED
    """
    app = serve(store)
    bring_to(store, "COMPLETED")
    forget = store.forget

    def late(*args: Any, **options: Any) -> bool:
        monkeypatch.setattr(store, "forget", forget)
        assert forget(*args, **options)
        time.sleep(0.002)  # no record begins in the millisecond in which the one before did
        settle(store, claim(store, KEY))
        return bool(forget(*args, **options))

    monkeypatch.setattr(store, "forget", late)
    assert operate_or_raise(app, KEY, OperationRequest("forget"))
    found = store.get(KEY)
    assert found is not None
    assert found.state is State.COMPLETED
