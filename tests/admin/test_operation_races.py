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
from celery_idempotent.records import Record, ReserveRequest, State
from celery_idempotent.stores import Store
from tests.support.admin import claim, identity, make_user, settle, value
from tests.support.waiting import wait_for

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


def requeued(store: Store, _: Record) -> None:
    """A sweep let its message be sent again, which keeps the token."""
    assert store.requeue(KEY, deadline_ms=60_000)


def anew(store: Store, _: Record) -> None:
    """Somebody else forgot it, and it ran again."""
    store.forget(KEY)
    settle(store, claim(store, KEY))


#: By operation and state: what may happen since it was seen. Each verb refuses all else: tests/proof/traces.py.
MEANWHILE: dict[tuple[str, str], tuple[Callable[[Store, Record], None], ...]] = {
    ("complete", "QUEUED"): (claimed,),
    ("complete", "INTERRUPTED"): (requeued,),
    ("complete", "STALE"): (claimed, completed),
    ("complete", "FAILED"): (anew,),
    ("complete", "COMPLETED"): (anew,),
    ("fail", "QUEUED"): (claimed, released, completed),
    ("fail", "INTERRUPTED"): (claimed, released, requeued),
    ("fail", "STALE"): (released, completed, requeued),
    ("forget", "STALE"): (requeued, claimed, completed),
    ("forget", "INTERRUPTED"): (claimed,),
    ("release", "QUEUED"): (claimed,),
    ("release", "STALE"): (claimed, completed),
    ("requeue", "INTERRUPTED"): (claimed,),
    ("requeue", "STALE"): (claimed, completed),
}


@pytest.mark.parametrize("when", ["before its look", "between look and write"])
@pytest.mark.parametrize(
    ("operation", "state", "meanwhile"),
    [(*about, each) for about, events in MEANWHILE.items() for each in events],
    ids=lambda given: getattr(given, "__name__", given),
)
def test_what_happened_since_it_was_seen_stays(
    store: Store,
    app: Any,
    monkeypatch: pytest.MonkeyPatch,
    operation: Any,
    state: str,
    meanwhile: Callable[[Store, Record], None],
    when: str,
) -> None:
    seen = bring_to(store, state)
    look, after = store.get, list[Record | None]()

    def looked(about: Any) -> Record | None:
        monkeypatch.setattr(store, "get", look)
        found = look(about)
        meanwhile(store, seen)
        after.append(look(about))
        return found if when == "between look and write" else after[0]

    monkeypatch.setattr(store, "get", looked)
    given = value("17") if operation == "complete" else None
    request = OperationRequest(operation, value=given, force=True, reason="wrong")
    outcome = operate(app, KEY, request, token=seen.token, state=seen.state)
    assert outcome is Outcome.CHANGED
    assert [store.get(KEY)] == after


@pytest.mark.parametrize(
    ("operation", "state", "after"),
    [
        ("release", "QUEUED", None),
        ("release", "PROCESSING", None),
        ("release", "STEPS", State.INTERRUPTED),
        ("requeue", "PROCESSING", State.QUEUED),
        ("requeue", "INTERRUPTED", State.QUEUED),
        ("forget", "COMPLETED", None),
        ("forget", "INTERRUPTED", None),
    ],
)
def test_one_that_the_store_sent_twice_is_told_as_done(
    store: Store,
    app: Any,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operation: Operation,
    state: str,
    after: State | None,
) -> None:
    """As after the COMMIT of a database whose answer is lost: the verb is done again, and finds its own work."""
    from django.contrib.admin.models import LogEntry

    seen = bring_to(store, state)
    verb = getattr(store, operation)

    def twice(*args: Any, **options: Any) -> Any:
        assert verb(*args, **options)
        return verb(*args, **options)

    monkeypatch.setattr(store, operation, twice)
    make_user("alice")
    request = OperationRequest(operation, who="alice", reason="it is stuck", force=True)
    outcome = operate(app, KEY, request, token=seen.token, state=seen.state)
    # Nobody can send this message, whatever became of the answer: it is not the app's.
    assert outcome is (Outcome.UNSENT if operation == "requeue" else Outcome.DONE)
    (entry,) = LogEntry.objects.values_list("user__username", "change_message")
    assert entry[0] == "alice"
    assert "it may have been done" not in entry[1]
    found = store.get(KEY)
    assert (None if found is None else found.state) is after
    assert operation == "requeue" or "alice " in caplog.text


def test_code_that_forgets_is_told_that_it_did_and_forgets_no_later_record(
    store: Store, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """::

    code     forget ─ deleted, and the answer is lost ─────────────── again: another token
    worker                                              claim ─ COMPLETED
    """
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
    assert (found := store.get(KEY)) is not None
    assert found.state is State.COMPLETED
