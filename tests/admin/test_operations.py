"""Operations from the list and from the page of a record: asked about once, done to what was seen, each is noted."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
from celery.signals import before_task_publish
from django.db import DatabaseError, InterfaceError, connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from celery_idempotent.celery.operations import (
    OperationRequest,
    Outcome,
    operate_on_each,
    operate_or_raise,
)
from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Record, State
from celery_idempotent.stores import Store, open_store
from tests.admin.pages import LIST, OPERATE, address, ask, confirm, fields, marks, said, text
from tests.support.admin import TASK, claim, identity, make_user, settle
from tests.support.waiting import wait_for

Serve = Callable[..., Any]


def stale(store: Store, *keys: str, **more: Any) -> None:
    """Claims whose leases ran out."""
    for key in keys:
        claim(store, key, lease_ms=1, **more)
    wait_for(lambda: store.stats().stale == len(keys), what="leases that ran out")


def crash(app: Any, store: Store, key: str, task_id: str = "task-1") -> Record:
    """An interrupted record that keeps the message of a task of the app."""
    task = app.tasks[TASK]
    message = task.idempotency_definition().codec.dump_message(task.s(key).set(task_id=task_id))
    record = claim(store, key, task_id=task_id, message=message)
    store.interrupt(record.identity, token=record.token)
    return record


def verdicts(page: Any) -> dict[str, str]:
    return {row.record.identity.key: row.verdict for row in page.context_data["rows"]}


def log(of: str = "object_repr") -> dict[str, str]:
    """Return what the admin's log says, of each record or by each user."""
    from django.contrib.admin.models import LogEntry

    told = list(LogEntry.objects.values_list(of, "change_message"))
    assert len(dict(told)) == len(told), "one is told twice"
    return dict(told)


def left(store: Store, *keys: str) -> dict[str, State | None]:
    found = {key: store.get(identity(key)) for key in keys}
    return {key: None if record is None else record.state for key, record in found.items()}


@pytest.fixture
def published() -> Any:
    """The task ids that are published meanwhile."""
    found: list[str] = []

    def note(headers: Any = None, **_: Any) -> None:
        found.append(headers["id"])

    before_task_publish.connect(note, weak=False)
    yield found
    before_task_publish.disconnect(note)


# -- one record --------------------------------------------------------------------------------------------------------


def test_a_stale_claim_is_released(store: Store, operator: Client) -> None:
    stale(store, "a")
    answer = confirm(operator, ask(operator, "release", one="a"), reason="its host is gone")
    assert answer["Location"] == address("a")
    assert left(store, "a") == {"a": None}
    assert log() == {f"{TASK} key a": "Released. Reason: its host is gone"}
    gone = operator.get(answer["Location"])
    assert gone.status_code == 404
    for told in (f"Released: {TASK} key a.", "Released. Reason: its host is gone", "never called"):
        assert told in text(gone)


def test_a_key_is_completed_with_a_value_and_its_page_says_who_and_why(
    memory: Store, app: Any, operator: Client
) -> None:
    stale(memory, "a", fingerprint=None)
    page = operator.get(address("a"))
    for wrong, problem in {"": "required", "ch_17": "is not JSON"}.items():
        answer = confirm(operator, ask(operator, "complete", one="a"), value=wrong)
        assert answer.status_code == 400
        assert problem in text(answer)
    assert log() == {}
    question = ask(operator, "complete", one="a")
    assert "It may have taken effect or not: check the outside system first." in text(question)
    assert confirm(operator, question, value='"ch_17"', reason="the bank has it").status_code == 302
    assert app.tasks[TASK].apply(("a",), throw=True).get() == "ch_17"
    assert log() == {f"{TASK} key a": "Completed. Reason: the bank has it"}
    for told in ("completed it with a value", ": the bank has it"):
        assert told in text(operator.get(address("a")))
    # A page of before does not replace it.
    assert 'value="complete"' in page.content.decode()
    assert "changed since" in said(operator, confirm(operator, question, value="18"))
    again = ask(operator, "complete", one="a")
    assert "callers may have got the old value" in text(again)
    for given, problem in ({}, "required"), ({"force": "on", "reason": ""}, "say why"):
        refused = confirm(operator, again, value="18", **given)
        assert (refused.status_code, problem in text(refused)) == (400, True)
    assert app.tasks[TASK].apply(("a",), throw=True).get() == "ch_17"
    confirm(operator, again, value="18", force="on", reason="typo")
    assert app.tasks[TASK].apply(("a",), throw=True).get() == 18


def test_a_message_is_published_again_under_its_task_id_or_the_operator_is_told(
    memory: Store, app: Any, operator: Client, published: list[str]
) -> None:
    crash(app, memory, "a")
    confirm(operator, ask(operator, "requeue", one="a"))
    assert left(memory, "a") == {"a": State.QUEUED}
    assert published == ["task-1"]
    record = claim(memory, "b", message=b"application/x-python-serialize\nbinary\nnothing")
    memory.interrupt(record.identity, token=record.token)
    answer = confirm(operator, ask(operator, "requeue", one="b"))
    assert "but not published" in said(operator, answer)
    assert "not published yet" in log()[f"{TASK} key b"]


# -- several -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "past", "after"),
    [
        ("release", "Released", None),
        ("fail", "Failed", State.FAILED),
        ("forget", "Forgotten", None),
        ("requeue", "Requeued", State.QUEUED),
    ],
)
def test_those_that_are_ticked_are_operated_on_after_one_question(
    store: Store, app: Any, operator: Client, operation: str, past: str, after: State | None
) -> None:
    if operation == "release":
        stale(store, *"abc")
    else:
        for n, key in enumerate("abc"):
            crash(app, store, key, f"task-{n}")
    before = left(store, *"abc")
    page = ask(operator, operation, "ab", query=f"?task={TASK}")
    assert f"{operation.capitalize()} 2 records ?" in text(page)
    assert verdicts(page) == {"a": "apply", "b": "apply"}
    assert (left(store, *"abc"), log()) == (before, {})
    done = confirm(operator, page, reason="the host is gone")
    assert done["Location"] == f"{LIST}?task={TASK}"
    assert f"{past}: 2 of 2." in said(operator, done)
    assert left(store, *"abc") == {**before, "a": after, "b": after}
    assert log() == dict.fromkeys(
        (f"{TASK} key a", f"{TASK} key b"), f"{past}. Reason: the host is gone"
    )


def test_the_question_says_the_verdict_of_each_and_why(store: Store, operator: Client) -> None:
    settle(store, claim(store, "done"))
    gone, moved = claim(store, "gone"), claim(store, "moved")
    claim(store, "live")
    stale(store, "stale")
    listed = marks(operator.get(f"{LIST}?state=any"))
    store.forget(gone.identity)
    settle(store, moved)
    page = operator.post(OPERATE, {"operation": "release", "record": list(listed.values())})
    skipped = dict.fromkeys(("done", "gone", "moved"), "skip")
    assert verdicts(page) == {**skipped, "live": "held", "stale": "apply"}
    for told in (
        "Release 1 record ? 1 more only if you force it. 3 will be left alone.",
        "1 may have run in part",
        "1 had a live owner, which is not stopped",
        "only a QUEUED or a PROCESSING record can be released",
        "there is no such record any more",
        "it has changed since it was shown",
        "its owner is live",
    ):
        assert told in text(page)
    assert fields(page)["record"] == [f"{listed['stale']}\n{listed['live']}"]


def test_all_that_match_are_operated_on_with_their_count_and_risks_first(
    store: Store, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_idempotent.django.admin import site

    monkeypatch.setattr(site, "PER_PAGE", 3)
    monkeypatch.setattr(site, "MOST", 7)
    for n in range(8):
        settle(store, claim(store, f"declined-{n}"), State.FAILED, error="Declined: no funds")
    settle(store, claim(store, "other"), State.FAILED, error="ValueError")
    query = "?state=FAILED&error=Declined"
    assert "All that match, up to 7" in text(operator.get(f"{LIST}{query}"))
    page: Any = operator.post(f"{OPERATE}{query}", {"operation": "forget", "all": "1"})
    for told in (
        "Only the first 7 are selected: do it again for the rest.",
        "Forget 7 records ?",
        "7 may have run in part: what it did may be done twice.",
        "The first 3 of 7.",
    ):
        assert told in text(page), told
    moved = page.context_data["rows"][0].record.identity
    store.forget(moved)
    claim(store, moved)
    told = said(operator, confirm(operator, page))
    assert "Forgotten: 6 of 7." in told
    assert f"Left alone: it has changed since ({moved})" in told
    assert store.stats().failed == 2
    assert list(left(store, "other", moved.key).values()) == [State.FAILED, State.PROCESSING]


def test_a_live_owner_keeps_its_key_unless_forced_with_a_reason(
    store: Store, operator: Client
) -> None:
    for key in "ab":
        claim(store, key)
    stale(store, "s")
    page = ask(operator, "release")
    for reason in ("", "  "):
        again = confirm(operator, page, force="on", reason=reason)
        assert again.status_code == 400
        assert "To force it, say why." in text(again)
        assert fields(again) == fields(page)
    told = said(operator, confirm(operator, page))
    assert left(store, *"abs") == {"a": State.PROCESSING, "b": State.PROCESSING, "s": None}
    assert "Released: 1 of 3." in told
    assert re.search(rf"Left alone: its owner is live \({TASK} key [ab] and 1 more\)", told)
    assert list(log()) == [f"{TASK} key s"]
    done = confirm(operator, ask(operator, "release"), force="on", reason="they hang")
    assert "Released: 2 of 2." in said(operator, done)
    assert "forced on a live owner. Reason: they hang" in log()[f"{TASK} key a"]


def test_each_is_done_whatever_the_outcome_of_the_others(
    store: Store, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale(store, *"abcd")
    page = ask(operator, "release")
    release = store.release

    def flaky(about: Any, **more: Any) -> bool:
        if about.key == "b":
            raise StoreUnavailable("somebody holds the row")
        return bool(1 / 0) if about.key == "d" else release(about, **more)

    monkeypatch.setattr(store, "release", flaky)
    claim(store, "c")
    told = said(operator, confirm(operator, page))
    assert left(store, *"abcd") == {"a": None, **dict.fromkeys("bcd", State.PROCESSING)}
    assert "Released: 1 of 4." in told
    assert f"Left alone: it has changed since ({TASK} key c)" in told
    assert f"It may have been done, or not: somebody holds the row ({TASK} key b)" in told
    assert "ZeroDivisionError. The log says more." in told
    for key in "bd":
        assert log()[f"{TASK} key {key}"].startswith("Release: it may have been done")
    assert f"{TASK} key c" not in log()
    # Sent again: what was done is not done to the claim that came after.
    claim(store, "a")
    again = said(operator, confirm(operator, page))
    assert re.search(rf"Left alone: it has changed since \({TASK} key \w and 1 more\)", again)
    assert left(store, "a") == {"a": State.PROCESSING}


def test_a_store_that_does_not_answer_is_not_waited_for_fifty_times(
    memory: Store, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stale(memory, *"abc")
    page = ask(operator, "release")

    def down(*_: Any, **__: Any) -> bool:
        raise StoreUnavailable("it is down")

    monkeypatch.setattr(memory, "release", down)
    answer = confirm(operator, page)
    assert "1 not tried: the store does not answer." in said(operator, answer)
    assert len(log()) == 2


def test_when_the_store_is_down_the_question_says_so(serve: Serve, operator: Client) -> None:
    serve("redis://127.0.0.1:1/0")
    asked = {"operation": "release", "record": f'1 PROCESSING ["{TASK}","","a"]'}
    assert operator.post(OPERATE, asked).status_code == 503
    done = operator.post(OPERATE, {**asked, "confirmed": "1", "reason": "x"})
    assert done.status_code == 302


MARKS = [f'1 FAILED ["t","","{n}"]' for n in range(501)]


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({}, "No action selected"),
        ({"operation": "explode"}, "No action selected"),
        ({"operation": "release"}, "No record selected"),
        ({"operation": "forget", "record": "\r\n".join(MARKS)}, "Select at most 500 records"),
        ({"operation": "complete", "record": MARKS[:2]}, "Select at most 1 records"),
    ],
)
def test_a_choice_that_means_nothing_leads_back_to_the_list(
    memory: Store, operator: Client, chosen: Any, why: str
) -> None:
    answer = operator.post(f"{OPERATE}?state=stale", chosen)
    assert answer["Location"] == f"{LIST}?state=stale"
    assert why in said(operator, answer)


@pytest.mark.parametrize(
    "mark",
    [
        "",
        '-1 FAILED ["t","","k"]',
        '1 DONE ["t","","k"]',
        "1 FAILED x",
        '1 FAILED ["t","","\\u0000"]',
        '99999999999999999999 FAILED ["t","","k"]',
        '² FAILED ["t","","k"]',
    ],
)
def test_a_mark_of_no_list_is_400(memory: Store, operator: Client, mark: str) -> None:
    sent = {"operation": "forget", "record": mark, "confirmed": "1"}
    assert operator.post(OPERATE, sent).status_code == 400


def test_each_operation_needs_its_own_permission(
    memory: Store, app: Any, log_in: Callable[..., Client]
) -> None:
    crash(app, memory, "a")
    claim(memory, "b")
    applies = {"a": ("requeue", "complete", "fail", "forget"), "b": ("release",)}
    listed = marks(log_in("view_idempotencyrecord").get(LIST))
    for may in ("release", "requeue", "complete", "fail", "forget", "nothing"):
        browser = log_in("view_idempotencyrecord", f"{may}_record")
        page = browser.get(LIST)
        assert page.content.count(b'form="idem-bulk"') == (
            0 if may in ("nothing", "complete") else 2
        )
        for key, operations in applies.items():
            buttons = browser.get(address(key)).content.decode()
            for operation in operations:
                allowed = operation == may
                assert (f'name="operation" value="{operation}"' in buttons) is allowed
                sent = {"operation": operation, "record": listed[key]}
                assert browser.post(OPERATE, sent).status_code == (200 if allowed else 403)
                if not allowed:
                    assert browser.post(OPERATE, {**sent, "confirmed": "1"}).status_code == 403
    assert left(memory, "a", "b") == {"a": State.INTERRUPTED, "b": State.PROCESSING}
    failer = log_in("view_idempotencyrecord", "fail_record")
    strict = Client(SERVER_NAME="localhost", enforce_csrf_checks=True)
    strict.cookies = failer.cookies
    sent = {"operation": "fail", "record": listed["a"], "confirmed": "1"}
    assert strict.post(OPERATE, sent).status_code == 403
    assert failer.post(OPERATE, sent).status_code == 302
    assert left(memory, "a") == {"a": State.FAILED}


def test_so_many_records_take_so_many_queries(
    serve: Serve, operator: Client, database: None
) -> None:
    """A page of 50: a query for each to ask, and twelve to forget it and to note it."""
    store = open_store("django://default")
    serve(store)
    for n in range(60):
        settle(store, claim(store, f"key-{n}"))
    with CaptureQueriesContext(connection) as queries:
        page = ask(operator, "forget", query="?state=COMPLETED")
    assert len(verdicts(page)) == 50
    assert len(queries) <= 20 + 50
    with CaptureQueriesContext(connection) as queries:
        done = confirm(operator, page)
    assert done.status_code == 302
    assert len(log()) == 50
    assert len(queries) <= 20 + 12 * 50


# -- the log: of named people, wherever they operate, and never waited for ------------------------------------------

ALICE = OperationRequest("forget", who="alice", reason="a test")
LOG = "django.contrib.admin.models.LogEntry.objects.create"


@pytest.fixture
def audited(memory, app):
    settle(memory, claim(memory, "order-1"))
    make_user("alice")
    return app


@pytest.mark.parametrize(
    ("who", "noted"),
    [("alice", {"alice": "Forgotten. Reason: a test"}), ("", {}), ("nobody here", {})],
)
def test_a_user_of_the_project_who_operates_in_code_is_in_the_log(audited, who, noted):
    request = OperationRequest("forget", who=who, reason="a test")
    assert operate_or_raise(audited, identity("order-1"), request)
    assert log("user__username") == noted


@pytest.mark.parametrize("error", [DatabaseError("down"), InterfaceError("closed"), RuntimeError()])
def test_a_log_that_fails_changes_no_outcome(audited, memory, error, caplog):
    with mock.patch(LOG, side_effect=error):
        assert operate_or_raise(audited, identity("order-1"), ALICE)
    assert memory.get(identity("order-1")) is None
    assert "the admin's log lacks this operation" in caplog.text
    assert "alice forgot" in caplog.text


def test_a_log_that_fails_hides_no_silent_store(audited, memory):
    """After two records without an answer the others are not tried, whatever the log says."""
    seen = [memory.get(identity("order-1"))] * 5
    silent = mock.patch.object(memory, "forget", side_effect=StoreUnavailable("no answer"))
    with silent, mock.patch(LOG, side_effect=InterfaceError("the connection is closed")):
        ended = list(operate_on_each(audited, ALICE, seen))
    assert [outcome for _, outcome, _ in ended] == [Outcome.UNKNOWN] * 2


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), KeyboardInterrupt()])
def test_what_may_have_been_done_is_in_the_log(audited, memory, error):
    with mock.patch.object(memory, "forget", side_effect=error), pytest.raises(type(error)):
        operate_or_raise(audited, identity("order-1"), ALICE)
    assert log("user__username") == {"alice": "Forget: it may have been done. Reason: a test"}
