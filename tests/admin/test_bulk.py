"""One operation on several records: asked about once, done to each that was seen, and each is noted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext

from celery_idempotent.errors import StoreUnavailable
from celery_idempotent.records import Record, Renewal, State
from celery_idempotent.stores import Store, open_store
from celery_idempotent.stores.memory import MemoryStore
from celery_idempotent.testing import FakeClock
from tests.admin.pages import LIST, fields, text
from tests.support.admin import TASK, claim, identity, settle
from tests.support.waiting import wait_for

Serve = Callable[..., Any]
BULK = f"{LIST}bulk/"


def stale(store: Store, *keys: str, **more: Any) -> list[Record]:
    """Claims whose leases ran out."""
    records = [claim(store, key, lease_ms=1, **more) for key in keys]
    wait_for(lambda: store.stats().stale == len(keys), what="leases that ran out")
    return records


def boxes(page: Any) -> dict[str, str]:
    """By its key what stands behind the box of each record in a list."""
    return {row.record.identity.key: row.mark for row in page.context_data["rows"]}


def ask(browser: Client, operation: str, keys: Iterable[str] | None = None, query: str = "") -> Any:
    """Choose records in the list, by default all, and press Go."""
    found = boxes(browser.get(f"{LIST}{query}"))
    chosen = [found[key] for key in (found if keys is None else keys)]
    return browser.post(f"{BULK}{query}", {"operation": operation, "record": chosen})


def said(browser: Client, answer: Any) -> str:
    """What the list says after an operation."""
    assert answer.status_code == 302
    return text(browser.get(answer["Location"]))


def verdicts(page: Any) -> dict[str, str]:
    return {line.seen.identity.key: line.verdict for line in page.context_data["lines"]}


def entries() -> dict[str, str]:
    from django.contrib.admin.models import LogEntry

    return {each.object_repr: each.change_message for each in LogEntry.objects.all()}


def left(store: Store, *keys: str) -> dict[str, State | None]:
    found = {key: store.get(identity(key)) for key in keys}
    return {key: None if record is None else record.state for key, record in found.items()}


def test_several_stale_claims_are_released_after_one_question(
    store: Store, serve: Serve, operator: Client
) -> None:
    serve(store)
    stale(store, "a", "b", "c")
    page = ask(operator, "release", ["a", "b"], "?state=stale")
    assert page.status_code == 200
    assert "Release 2 records ?" in text(page)
    assert verdicts(page) == {"a": "apply", "b": "apply"}
    assert set(left(store, "a", "b").values()) == {State.PROCESSING}
    assert entries() == {}
    done = operator.post(f"{BULK}?state=stale", {**fields(page), "reason": "the host is gone"})
    assert done["Location"] == f"{LIST}?state=stale"
    assert "Released: 2 of 2." in said(operator, done)
    assert left(store, "a", "b", "c") == {"a": None, "b": None, "c": State.PROCESSING}
    note = "Released. Reason: the host is gone"
    assert entries() == {f"{TASK} key a": note, f"{TASK} key b": note}


@pytest.mark.parametrize("operation", ["fail", "forget", "requeue"])
def test_all_of_a_page_are_operated_on(
    store: Store, serve: Serve, operator: Client, operation: str
) -> None:
    app = serve(store)
    task = app.tasks[TASK]
    codec = task.idempotency_definition().codec
    for n, key in enumerate("abc"):
        message = codec.dump_message(task.s(key).set(task_id=f"task-{n}"))
        record = claim(store, key, task_id=f"task-{n}", message=message)
        store.interrupt(record.identity, token=record.token)
    page = ask(operator, operation)
    assert verdicts(page) == dict.fromkeys("abc", "apply")
    done = operator.post(BULK, fields(page))
    assert "3 of 3." in said(operator, done)
    after = {"fail": State.FAILED, "forget": None, "requeue": State.QUEUED}[operation]
    assert left(store, *"abc") == dict.fromkeys("abc", after)
    assert len(entries()) == 3


def test_the_question_says_what_becomes_of_each_and_why(
    store: Store, serve: Serve, operator: Client
) -> None:
    serve(store)
    settle(store, claim(store, "done"))
    gone, moved = claim(store, "gone"), claim(store, "moved")
    claim(store, "live")
    stale(store, "stale")
    listed = boxes(operator.get(LIST))
    store.forget(gone.identity)
    settle(store, moved)
    page = operator.post(BULK, {"operation": "release", "record": list(listed.values())})
    assert verdicts(page) == {
        "done": "skip",
        "gone": "skip",
        "moved": "skip",
        "live": "held",
        "stale": "apply",
    }
    asked = text(page)
    assert "Release 1 record ? 1 more only if you force it. 3 will be left alone." in asked
    assert "only a QUEUED or a PROCESSING record can be released" in asked
    assert "there is no such record any more" in asked
    assert "it has changed since it was shown" in asked
    assert "its owner is live" in asked
    sent = fields(page)
    assert sent["record"] == [listed["stale"]]
    assert sent["live"] == [listed["live"]]


def test_a_live_owner_keeps_its_key_unless_forced_with_a_reason(
    store: Store, serve: Serve, operator: Client
) -> None:
    serve(store)
    for key in "ab":
        claim(store, key)
    stale(store, "s")
    page = ask(operator, "release")
    for given in ({"force": "on", "reason": ""}, {"force": "on", "reason": "  "}):
        again = operator.post(BULK, {**fields(page), **given})
        assert again.status_code == 400
        assert "This field is required" in text(again)
        assert fields(again) == fields(page)
    assert set(left(store, "a", "b", "s").values()) == {State.PROCESSING}
    done = operator.post(BULK, fields(page))
    assert left(store, "a", "b", "s") == {"a": State.PROCESSING, "b": State.PROCESSING, "s": None}
    told = said(operator, done)
    assert f"Released: {TASK} key s." in told
    assert "2 left alone: the owner is live." in told
    assert list(entries()) == [f"{TASK} key s"]
    page = ask(operator, "release")
    done = operator.post(BULK, {**fields(page), "force": "on", "reason": "they hang"})
    assert "Released: 2 of 2." in said(operator, done)
    assert "forced on a live owner. Reason: they hang" in entries()[f"{TASK} key a"]


def test_what_was_live_when_asked_is_left_alone_although_its_lease_ran_out_since(
    serve: Serve, operator: Client
) -> None:
    clock = FakeClock()
    memory = MemoryStore(clock)
    serve(memory)
    record = claim(memory, "a", lease_ms=1_000)
    page = ask(operator, "release")
    assert verdicts(page) == {"a": "held"}
    clock.advance(1_001)
    asked = operator.post(BULK, fields(page))
    assert (asked.status_code, verdicts(asked)) == (400, {"a": "apply"})
    assert memory.get(record.identity) == record


def test_a_force_takes_only_what_was_live_when_asked(serve: Serve, operator: Client) -> None:
    """A frozen worker that wakes up after the question keeps its key: nobody forced that one."""
    clock = FakeClock()
    memory = MemoryStore(clock)
    serve(memory)
    frozen = claim(memory, "frozen", lease_ms=1_000)
    claim(memory, "live")
    clock.advance(1_001)
    page = ask(operator, "release")
    assert verdicts(page) == {"frozen": "apply", "live": "held"}
    renewal = Renewal(identity=frozen.identity, token=frozen.token, lease_ms=60_000, keep_ms=60_000)
    assert memory.renew([renewal]) == [True]
    operator.post(BULK, {**fields(page), "force": "on", "reason": "it hangs"})
    assert left(memory, "frozen", "live") == {"frozen": State.PROCESSING, "live": None}


def test_a_live_record_among_the_others_is_not_taken_by_a_forged_form(
    store: Store, serve: Serve, operator: Client
) -> None:
    serve(store)
    claim(store, "a")
    page = ask(operator, "release")
    sent = fields(page)
    forged = {**sent, "record": sent["live"], "force": "on", "reason": "forged", "again": "on"}
    del forged["live"]
    assert "Left alone: its owner is live" in said(operator, operator.post(BULK, forged))
    assert left(store, "a") == {"a": State.PROCESSING}
    assert entries() == {}


def test_each_is_done_whatever_comes_of_the_others(
    store: Store, serve: Serve, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(store)
    stale(store, "a", "b", "c", "d")
    page = ask(operator, "release")
    release = store.release

    def flaky(about: Any, **more: Any) -> bool:
        if about.key == "b":
            raise StoreUnavailable("somebody holds the row")
        return release(about, **more)

    monkeypatch.setattr(store, "release", flaky)
    claim(store, "c")
    done = operator.post(BULK, fields(page))
    assert left(store, *"abcd") == {
        "a": None,
        "b": State.PROCESSING,
        "c": State.PROCESSING,
        "d": None,
    }
    told = said(operator, done)
    assert "Released: 2 of 4." in told
    assert f"Left alone: it has changed meanwhile ({TASK} key c)" in told
    assert f"Not known whether it was done: {TASK} key b. somebody holds the row" in told
    noted = entries()
    assert noted[f"{TASK} key b"].startswith("Release: it may have been done")
    assert f"{TASK} key c" not in noted
    # Sent again: what was done is not done to the claim that came after.
    claim(store, "a")
    again = operator.post(BULK, fields(page))
    assert f"Left alone: it has changed meanwhile ({TASK} key a)" in said(operator, again)
    assert left(store, "a") == {"a": State.PROCESSING}


def test_a_fault_of_ours_ends_none_of_the_others(
    memory: Store, serve: Serve, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(memory)
    stale(memory, "a", "b")
    page = ask(operator, "release")
    release = memory.release

    def broken(about: Any, **more: Any) -> bool:
        return release(about, **more) if about.key == "b" else bool(1 / 0)

    monkeypatch.setattr(memory, "release", broken)
    done = operator.post(BULK, fields(page))
    told = said(operator, done)
    assert "ZeroDivisionError. The log says more." in told
    assert "Released: 1 of 2." in told
    assert "it may have been done" in entries()[f"{TASK} key a"]


def test_a_store_that_does_not_answer_is_not_waited_for_fifty_times(
    memory: Store, serve: Serve, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(memory)
    stale(memory, "a", "b", "c")
    page = ask(operator, "release")

    def down(*_: Any, **__: Any) -> bool:
        raise StoreUnavailable("it is down")

    monkeypatch.setattr(memory, "release", down)
    assert "1 not tried: the store does not answer." in said(
        operator, operator.post(BULK, fields(page))
    )
    assert len(entries()) == 2


def test_when_the_store_is_down_the_question_says_so(serve: Serve, operator: Client) -> None:
    serve("redis://127.0.0.1:1/0")
    mark = f'1 PROCESSING ["{TASK}","","a"]'
    asked = {"operation": "release", "record": mark}
    assert operator.post(BULK, asked).status_code == 503
    done = operator.post(BULK, {**asked, "confirmed": "1", "again": "on", "reason": "x"})
    assert done.status_code == 302


@pytest.mark.parametrize(
    ("chosen", "why"),
    [
        ({}, "No action selected"),
        ({"operation": "explode", "record": "x"}, "No action selected"),
        ({"operation": "release"}, "No record selected"),
        (
            {"operation": "forget", "record": [f'1 FAILED ["t","","{n}"]' for n in range(51)]},
            "Select 50 records at most",
        ),
    ],
)
def test_a_choice_that_means_nothing_leads_back_to_the_list(
    memory: Store, serve: Serve, operator: Client, chosen: Any, why: str
) -> None:
    serve(memory)
    answer = operator.post(f"{BULK}?state=stale", chosen)
    assert answer.status_code == 302
    assert answer["Location"] == f"{LIST}?state=stale"
    assert why in said(operator, answer)


@pytest.mark.parametrize(
    "mark",
    [
        "",
        "x",
        '-1 FAILED ["t","","k"]',
        '1 DONE ["t","","k"]',
        "1 FAILED x",
        '1 FAILED ["t",""]',
        '1 FAILED ["t","","\\u0000"]',
        '99999999999999999999 FAILED ["t","","k"]',
        '² FAILED ["t","","k"]',
    ],
)
def test_what_no_list_sent_is_400(memory: Store, serve: Serve, operator: Client, mark: str) -> None:
    serve(memory)
    for name, confirmed in (("record", ""), ("record", "1"), ("live", "1")):
        sent = {"operation": "forget", name: mark, "confirmed": confirmed}
        assert operator.post(BULK, sent).status_code == 400


def test_what_may_happen_twice_takes_a_tick_and_a_reason(
    memory: Store, serve: Serve, operator: Client
) -> None:
    serve(memory)
    stale(memory, "s")
    settle(memory, claim(memory, "paid"))
    page = ask(operator, "forget")
    risk = "1 took effect, 1 may have taken effect, of 2 records: I know that they may be done"
    assert risk in text(page)
    for missing in ("again", "reason"):
        answer = operator.post(BULK, {**fields(page), missing: ""})
        assert answer.status_code == 400
    assert left(memory, "s", "paid") == {"s": State.PROCESSING, "paid": State.COMPLETED}
    failed = operator.post(BULK, {**fields(ask(operator, "fail", ["s"]))})
    assert f"Failed: {TASK} key s." in said(operator, failed)


def test_each_operation_needs_its_permission(
    memory: Store, serve: Serve, log_in: Callable[..., Client], client_without_csrf: Any
) -> None:
    serve(memory)
    stale(memory, "a")
    viewer = log_in("view_idempotencyrecord")
    page = viewer.get(LIST)
    assert b'name="record"' not in page.content
    assert b"idem-bulk" not in page.content
    failer = log_in("view_idempotencyrecord", "fail_record")
    page = failer.get(LIST)
    assert page.content.count(b'form="idem-bulk"') == 1
    assert "Fail selected records" in text(page)
    assert "Forget selected records" not in text(page)
    (mark,) = boxes(page).values()
    nosy = log_in("fail_record")
    for browser, operation in ((viewer, "fail"), (failer, "forget"), (nosy, "fail")):
        for more in ({}, {"confirmed": "1"}):
            sent = {"operation": operation, "record": mark, **more}
            assert browser.post(BULK, sent).status_code == 403
    assert left(memory, "a") == {"a": State.PROCESSING}
    sent = {"operation": "fail", "record": mark, "confirmed": "1"}
    assert client_without_csrf(failer).post(BULK, sent).status_code == 403
    assert failer.post(BULK, sent).status_code == 302
    assert left(memory, "a") == {"a": State.FAILED}


@pytest.fixture
def client_without_csrf() -> Callable[[Client], Client]:
    """The same person, in a browser that is asked for the token of the form."""

    def strict(client: Client) -> Client:
        found = Client(SERVER_NAME="localhost", enforce_csrf_checks=True)
        found.cookies = client.cookies
        return found

    return strict


def test_names_are_no_markup(memory: Store, serve: Serve, operator: Client) -> None:
    serve(memory)
    evil = identity('"><script>alert(1)</script>', scope="</a><b>", namespace="<i>x</i>")
    settle(memory, claim(memory, evil, worker="<u>host</u>:1"))
    page = ask(operator, "forget")
    done = operator.get(operator.post(BULK, fields(page))["Location"])
    assert "Forgotten: <i>x" in text(done)
    for answer in (page, done):
        for markup in ("<script>alert", "<b>", "<i>x", "<u>"):
            assert markup not in answer.content.decode()


def test_so_many_records_take_so_many_queries(
    serve: Serve, operator: Client, database: None
) -> None:
    """A page of 50: a query for each to ask, and twelve to forget it and to note it."""
    store = open_store("django://default")
    serve(store)
    for n in range(60):
        settle(store, claim(store, f"key-{n}"))
    with CaptureQueriesContext(connection) as queries:
        page = ask(operator, "forget", query="?task=shop.charge")
    assert len(verdicts(page)) == 50
    assert len(queries) <= 20 + 50
    with CaptureQueriesContext(connection) as queries:
        done = operator.post(BULK, fields(page))
    assert done.status_code == 302
    assert len(entries()) == 50
    assert len(queries) <= 20 + 12 * 50
