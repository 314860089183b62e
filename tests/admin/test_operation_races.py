"""Between the look of an operation and its write the key may move on: what is there by then is left alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from celery_idempotent.celery.operations import OperationRequest, Outcome, operate
from celery_idempotent.records import Record, ReserveRequest, SettleRequest, State
from celery_idempotent.stores import Store
from tests.support.admin import claim, identity, settle, value
from tests.support.waiting import wait_for

Serve = Callable[..., Any]
KEY = identity("a")
MESSAGE = b"application/json\nutf-8\n{}"


def bring_to(store: Store, state: str) -> Record:
    """Bring the key into a state, ``"STALE"`` for PROCESSING whose lease ran out."""
    if state == "QUEUED":
        store.reserve(
            ReserveRequest(identity=KEY, task_id="task-1", deadline_ms=60_000, keep_ms=60_000)
        )
    else:
        record = claim(store, KEY, lease_ms=1 if state == "STALE" else 60_000, message=MESSAGE)
        if state == "INTERRUPTED":
            store.interrupt(KEY, token=record.token)
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
        ("complete pay", "STALE", claimed),
        ("complete pay", "STALE", completed),
        ("complete pay", "INTERRUPTED", claimed),
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
        ("forget", "COMPLETED", anew),
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
    operation, _, step = operation.partition(" ")
    about: dict[str, Any] = {"step": step or None}
    if operation == "complete":
        about["value"] = value("17")
    outcome = operate(
        app, KEY, OperationRequest(operation, **about), token=seen.token, state=seen.state
    )
    assert outcome is Outcome.CHANGED
    assert [store.get(KEY)] == after


def test_what_was_requeued_since_it_was_seen_is_not_failed(store: Store, serve: Serve) -> None:
    """It has the same token still, and a message is under way for it."""
    app = serve(store)
    seen = bring_to(store, "INTERRUPTED")
    queued = store.requeue(KEY, deadline_ms=60_000)
    assert queued is not None
    assert queued.token == seen.token
    outcome = operate(app, KEY, OperationRequest("fail"), token=seen.token, state=seen.state)
    assert outcome is Outcome.CHANGED
    assert store.get(KEY) == queued
