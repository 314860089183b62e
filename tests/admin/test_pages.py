"""The list and the page of a record say what the store says, over every store, and never much more work than stated."""

from __future__ import annotations

import re
from collections.abc import Callable
from html import unescape
from typing import Any
from urllib.parse import quote as url_quote

import pytest
from celery import Celery
from django.core import checks
from django.test import Client, override_settings

from celery_idempotent import IdempotentTask
from celery_idempotent.celery import finding
from celery_idempotent.celery.story import tell_story
from celery_idempotent.errors import FailedByOperator
from celery_idempotent.http.answers import ResponseCodec
from celery_idempotent.keys.rules import canonical
from celery_idempotent.records import Identity, State, Stored
from celery_idempotent.stores import Store, open_store
from tests.admin.pages import LIST, OPERATE, OVERVIEW, address, ask, confirm, keys, text
from tests.support.admin import TASK, claim, fill, identity, settle, value
from tests.support.weight import statements

Serve = Callable[..., Any]


@pytest.fixture
def filled(store: Store) -> Store:
    fill(store)
    return store


FOUND: list[tuple[dict[str, str], set[str]]] = [
    ({}, {"failed", "live", "stale", "interrupted", "queued"}),
    ({"state": "any"}, {"done", "elsewhere", "failed", "live", "stale", "interrupted", "queued"}),
    ({"state": "live"}, {"live", "queued"}),
    ({"state": "PROCESSING"}, {"live", "stale"}),
    ({"state": "stale"}, {"stale"}),
    ({"state": "FAILED"}, {"failed"}),
    ({"state": "COMPLETED"}, {"done", "elsewhere"}),
    ({"task": "shop.ship"}, set()),
    ({"task": "shop.ship", "state": "any"}, {"elsewhere"}),
    ({"error": "Declined"}, {"failed"}),
    ({"error": "Declined", "state": "INTERRUPTED"}, set()),
    ({"error": "Other", "state": "FAILED"}, set()),
    ({"scope": "tenant-1"}, {"done"}),
    ({"task": TASK, "state": "COMPLETED"}, {"done"}),
    ({"before": "1h"}, set()),
    ({"since": "10m", "state": "FAILED"}, {"failed"}),
    ({"key": "done"}, {"done"}),
    ({"key": "nothing"}, set()),
    ({"key": "elsewhere", "task": "shop.ship"}, {"elsewhere"}),
    ({"key": "done", "state": "FAILED"}, set()),
]


def test_filters_and_search_find_what_they_say(filled: Store, operator: Client) -> None:
    for query, found in FOUND:
        answer = operator.get(LIST, query)
        assert answer.status_code == 200, query
        assert keys(answer) == found, query


def fail(store: Store, key: str) -> None:
    written = '{"exc_type": "Declined", "exc_message": ["no funds"], "exc_module": "shop"}'
    settle(store, claim(store, key), State.FAILED, value(written), "Declined: no funds")


def test_the_list_says_why_records_failed_and_the_message_to_those_who_may_see_results(
    store: Store, operator: Client, log_in: Callable[..., Client]
) -> None:
    fail(store, "failed")
    settle(store, claim(store, "done"), stored=value('"the result"'))
    for key, end in (("lost", store.interrupt), ("half", store.release)):
        record = claim(store, key)
        store.checkpoint(record.identity, token=record.token, name="charged", value=value("1"))
        end(record.identity, token=record.token)

    def reasons(browser: Client) -> dict[str, str]:
        rows = browser.get(LIST).context_data["rows"]  # type: ignore[index]
        return {row.cells["key"]: row.cells["error"] for row in rows if row.cells["error"]}

    permitted = {
        "lost": "Its lease ended without a result.",
        "half": "Its run ended after some steps.",
        "failed": "Declined",
    }
    viewer = log_in("view_idempotencyrecord")
    assert reasons(viewer) == permitted
    assert reasons(operator) == permitted | {"failed": "Declined: no funds"}
    for page in (LIST, OVERVIEW, address("failed")):
        assert re.search("FAILED .*Declined: no funds", text(operator.get(page)))
        assert re.search("1 record in all.* Newest", text(operator.get(f"{LIST}?state=FAILED")))
        assert "no funds" not in text(viewer.get(page))


def test_a_task_id_finds_the_record_of_its_task(store: Store, operator: Client) -> None:
    claim(store, "live", task_id="id-of-live")
    settle(store, claim(store, "failed", task_id="id-of-failed"), State.FAILED)
    for task_id in ("first", "id-of-crashed"):  # a later delivery, under another id
        crashed = claim(store, "crashed", task_id=task_id)
        store.interrupt(crashed.identity, token=crashed.token)
    settle(store, claim(store, "done", task_id="id-of-done"))
    for key in ("live", "failed", "crashed", "done"):
        about = {"key": f"id-of-{key}"}
        assert keys(operator.get(LIST, about)) == {key}
        assert keys(operator.get(LIST, {**about, "task": "shop.ship"})) == set()
    answer = operator.get(LIST, {"key": "id-of-none"})
    assert keys(answer) == set()
    assert "No record has this key or task id: id-of-none" in text(answer)


def test_a_record_page_shows_what_the_record_knows(store: Store, operator: Client) -> None:
    record = claim(store, identity("a", scope="tenant-1"))
    store.checkpoint(record.identity, token=record.token, name="charged", value=value('"4711"'))
    page = operator.get(address(record.identity))
    said = text(page)
    for what in (
        f"Token {record.token} ",
        "Key a Task shop.charge Scope tenant-1",
        "Owner worker-1.example:4711",
        f"Task id {record.task_id}",
        f"Fingerprint {bytes(range(16)).hex()}",
        "Crashes 0",
        "Steps done, which are not repeated: charged.",
    ):
        assert what in said, what
    assert "4711&quot;" not in page.content.decode()


def test_a_result_is_for_those_who_may_see_it_and_is_no_markup(
    memory: Store, operator: Client, log_in: Callable[..., Client]
) -> None:
    settle(memory, claim(memory, "a"), stored=value('"<script>alert(1)</script>"'))
    page = operator.get(address("a")).content.decode()
    assert "&lt;script&gt;alert(1)" in page
    assert "<script>alert" not in page
    page = log_in("view_idempotencyrecord").get(address("a")).content.decode()
    assert "alert" not in page
    assert "You have no permission to see it." in page


def test_names_are_no_markup(memory: Store, operator: Client) -> None:
    evil = identity('"><script>alert(1)</script>', scope="</a><b>", namespace="<i>x</i>")
    settle(memory, claim(memory, evil, worker="<u>host</u>:1"))
    memory.count({("<i>x</i>", "claimed"): 1})  # type: ignore[attr-defined]
    pages = [operator.get(page) for page in (f"{LIST}?state=any", address(evil), OVERVIEW)]
    question = ask(operator, "forget", one=evil)
    pages += [question, operator.get(confirm(operator, question)["Location"])]
    assert "Forgotten: <i>x" in text(pages[-1])
    for page in pages:
        for markup in ("<script>alert", "<b>", "<i>x", "<u>"):
            assert markup not in page.content.decode(), page


def test_what_the_app_does_not_accept_is_not_unpickled(memory: Store, operator: Client) -> None:
    pickled = Stored(
        content_type="application/x-python-serialize",
        content_encoding="binary",
        body=b"cos\nsystem\n(S'exit 1'\ntR.",
    )
    settle(memory, claim(memory, "a"), stored=pickled)
    settle(memory, claim(memory, identity("b", namespace="of.nobody")), State.FAILED, pickled)
    for about in (identity("a"), identity("b", namespace="of.nobody")):
        assert "which this app does not accept" in text(operator.get(address(about)))


def test_long_results_are_cut(memory: Store, operator: Client) -> None:
    settle(memory, claim(memory, "long"), stored=value('"' + "x" * 50_000 + '"'))
    settle(memory, claim(memory, "none"))
    settle(memory, claim(memory, "broken"), stored=value("{"))
    page = operator.get(address("long"))
    assert "(cut here)" in text(page)
    assert len(page.content) < 40_000
    assert "It was not kept in the record." in text(operator.get(address("none")))
    assert "cannot be read" in text(operator.get(address("broken")))


BAD = [
    {"state": "DONE"},
    {"since": "1y"},
    {"key": "x" * 256},
    {"key": "a\0b"},
    {"cursor": "x" * 101},
    {"cursor": "r:<b>"},
    {"cursor": "elsewhere"},
]


def test_a_bad_query_is_400_and_says_so(store: Store, operator: Client) -> None:
    for query in BAD:
        answer = operator.get(LIST, query)
        assert answer.status_code == 400, query
        assert b"errorlist" in answer.content, query


NO_RECORDS = [
    "x",
    '["a","b"]',
    '["a","b",3]',
    '["","","k"]',
    '["n","",""]',
    '["n","","' + "k" * 256 + '"]',
    '["n","","\\u0000"]',
    '["n","","\\ud800"]',
    "[" * 9000,
    "x" * 20_000,
]


def test_an_address_of_no_record_is_404(memory: Store, operator: Client) -> None:
    from django.contrib.admin.utils import quote

    for name in NO_RECORDS:
        answer = operator.get(f"{OVERVIEW}{url_quote(quote(name))}/change/")
        assert answer.status_code == 404, name[:40]
        assert "This address is not that of a record." in text(answer)


def test_each_page_is_for_those_who_may(
    memory: Store, operator: Client, log_in: Callable[..., Client]
) -> None:
    claim(memory, "a")
    stranger = log_in("release_record", "forget_record", "view_result")
    for page in (LIST, OVERVIEW, address("a"), OPERATE):
        assert stranger.get(page).status_code == 403, page
        assert Client(SERVER_NAME="localhost").get(page).status_code == 302, page
        assert operator.get(page).status_code == (302 if page == OPERATE else 200), page
    assert "Idempotency" not in text(stranger.get("/admin/"))


def test_when_the_store_is_down_or_not_set_each_page_says_so(
    serve: Serve, operator: Client
) -> None:
    serve("redis://127.0.0.1:1/0")
    for page in (LIST, f"{LIST}?key=a", address("a"), OVERVIEW):
        answer = operator.get(page)
        assert answer.status_code == 503
        assert "127.0.0.1:1 did not answer" in text(answer)
        assert "Django administration" in text(answer)
    app = Celery("storeless", set_as_current=False, broker="amqp://", backend="rpc://")
    with override_settings(CELERY_IDEMPOTENT_APP=app):
        assert "set idempotency_store" in text(operator.get(LIST))


def test_a_setting_that_names_no_app_is_said_by_the_checks() -> None:
    for wrong in ("no.such.module", "celery_idempotent.records.State", 5):
        with override_settings(CELERY_IDEMPOTENT_APP=wrong):
            found = checks.run_checks(tags=["idempotency"])
        assert [each.id for each in found] == ["celery_idempotent.E012"], wrong


def test_completed_records_are_browsed_in_steps_until_all_were_seen(
    store: Store, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_idempotent.django.admin import site

    monkeypatch.setattr(site, "PER_PAGE", 7)
    monkeypatch.setattr(finding, "LOOK_AT", 20)
    wanted = {f"key-{n}" for n in range(30)}
    for key in wanted:
        settle(store, claim(store, key))
    seen: set[str] = set()
    url = f"{LIST}?state=COMPLETED"
    while url:
        answer: Any = operator.get(url)
        seen |= keys(answer)
        assert re.search(
            "[0-9]+ records? on this page, looked at .* keys?\\. The newest", text(answer)
        )
        assert ("keys, continue" in text(answer)) is bool(answer.context_data["more"])
        url = answer.context_data["more"] and LIST + answer.context_data["more"]
    assert seen == wanted


@pytest.mark.parametrize(
    ("key", "typed"),
    [("order-17", "order-17"), ('"17"', "17"), ("17", "17"), ("@4711-abc", "4711-abc")],
)
def test_a_key_is_found_as_people_write_it(
    memory: Store, operator: Client, key: str, typed: str
) -> None:
    settle(memory, claim(memory, key))
    assert keys(operator.get(LIST, {"key": typed})) == {key}


def test_tasks_and_views_go_by_one_name(memory: Store, app: Any, operator: Client) -> None:

    @app.task(
        name="shop.refund", base=IdempotentTask, idempotency_namespace="refunds", shared=False
    )
    def refund() -> None: ...

    settle(memory, claim(memory, identity("of-task", namespace="refunds")))
    for name in ("shop.refund", "refunds"):
        page = operator.get(LIST, {"task": name, "state": "any"})
        assert keys(page) == {"of-task"}
        assert "shop.refund" in text(page)


#: So many queries a page may take, with session, user, permissions and the admin's log: 100 records or a million.
BOUNDS: dict[str, tuple[Any, int]] = {
    "list": (LIST, 14),
    "completed": (f"{LIST}?state=COMPLETED", 10),
    "filtered": (f"{LIST}?state=FAILED&task=shop.charge&since=1h", 13),
    "search": (f"{LIST}?key=key-1&task=shop.charge", 12),
    "record": (address, 12),
    "overview": (OVERVIEW, 12),
}


@pytest.mark.parametrize("vendor", ["sqlite", "postgresql"])
def test_a_page_takes_no_more_queries_than_stated(
    vendor: str, serve: Serve, operator: Client, request: pytest.FixtureRequest
) -> None:
    alias = request.getfixturevalue("postgresql") if vendor == "postgresql" else "default"
    store = open_store(f"django://{alias}")
    serve(store)
    for n in range(120):
        settle(store, claim(store, f"key-{n}"))
        fail(store, f"failed-{n}")
    for where, bound in BOUNDS.values():
        url = where if isinstance(where, str) else where("key-1")
        operator.get(url)  # what is looked up once a process
        with statements() as asked:
            assert operator.get(url).status_code == 200
        assert 3 <= len(asked) <= bound, (url, [each[:200] for each in asked])
    store.close()


def test_the_page_of_a_record_says_what_explain_says(memory, app, operator):
    fail(memory, "order-1")
    story = tell_story(app, memory, memory.get(identity("order-1")))
    page = text(operator.get(address("order-1")))
    for sentence in (story.headline, *story.past, *story.future, *story.choices.values()):
        assert sentence.split(" (")[0] in page
    assert f"{story.headline} Declined: no funds So far" in page


def test_the_page_of_a_record_leads_to_others(memory: Store, operator: Client) -> None:
    settle(memory, claim(memory, about := identity("order-1", scope='["user",17]')))
    settle(memory, claim(memory, identity("order-2", scope='["user",17]')))
    settle(memory, claim(memory, "order-1"))
    settle(memory, claim(memory, identity("order-3", namespace="shop.ship")))
    page: Any = operator.get(address(about))
    links = re.findall(rf'href="({LIST}\?(?:state=any&amp;)?(\w+)=[^"]+)"', page.content.decode())
    assert {name: keys(operator.get(unescape(link))) for link, name in links} == LINKS


LINKS = {"task": {"order-1", "order-2"}, "scope": {"order-1", "order-2"}, "key": {"order-1"}}


def test_the_page_of_a_record_names_the_other_scopes_that_have_its_key(
    store: Store, operator: Client
) -> None:
    """A customer was charged twice: by the task's own key, and by a request."""
    sent = identity("order-1", scope='["user",17]')
    for about in (identity("order-1"), sent, identity("order-2")):
        settle(store, claim(store, about))
    assert keys(operator.get(LIST, {"key": "order-1", "scope": '["user", 17]'})) == {"order-1"}
    found: Any = operator.get(LIST, {"key": "order-1"})
    assert len(found.context_data["rows"]) == 2
    page = operator.get(address("order-1"))
    assert address(sent) in page.content.decode()
    assert re.search(r'The same key elsewhere .+ order-1 COMPLETED .+ \["user",17\]', text(page))


def test_a_search_that_takes_too_long_is_gone_on_with(
    memory: Store, operator: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from celery_idempotent.django.admin import site

    for n in range(5):
        settle(memory, claim(memory, f"order-{n}"))
    settle(memory, claim(memory, identity("order-0", scope="acme")))
    monkeypatch.setattr(site, "ELSEWHERE_SECONDS", -1.0)
    monkeypatch.setattr(finding, "LOOK_AT", 1)
    assert "Not every record was looked at" in text(operator.get(address("order-0")))
    monkeypatch.setattr(site, "LOOK_SECONDS", -1.0)
    monkeypatch.setattr(finding, "LOOK_AT", 2)
    url, scopes = f"{LIST}?key=order-0", set()
    while url:
        page: Any = operator.get(url)
        scopes |= {row.record.identity.scope for row in page.context_data["rows"]}
        more = page.context_data["more"]
        assert ("not every record has been looked at yet" in text(page)) is bool(more)
        url = more and LIST + more
    assert scopes == {"", "acme"}


def of_user(key: str, pk: object) -> Identity:
    """A key that a user sent to the test project's `POST /payments/now/`."""
    return Identity(
        namespace="http", scope=canonical(("user", pk), what="scope", task="t"), key=key
    )


def response(body: bytes, *, headers: str = "Content-Type: application/json") -> Stored:
    head = f"HTTP/1.1 201 Created\r\n{headers}\r\n\r\n".encode()
    return Stored(content_type="application/http", content_encoding="binary", body=head + body)


def value_of(client: Client, about: Identity) -> str:
    from html import unescape

    page = client.get(address(about)).content.decode().partition('<pre class="idem-value"')[2]
    return unescape(page.partition(">")[2].partition("</pre>")[0])


def test_the_answer_of_a_view_is_shown_as_it_was_sent(
    memory: Store, operator: Client, log_in: Callable[..., Client]
) -> None:
    about = of_user("a", 17)
    kept = response(
        '{"name": "Zoë <b>"}'.encode(), headers="Content-Type: application/json\r\nLocation: /p/1/"
    )
    settle(memory, claim(memory, about), stored=kept)
    assert value_of(operator, about).splitlines() == [
        "HTTP/1.1 201 Created",
        "Content-Type: application/json",
        "Location: /p/1/",
        "",
        '{"name": "Zoë <b>"}',
    ]
    page = operator.get(address(about))
    assert "View http (requests with an Idempotency-Key)" in text(page)
    assert "no task of this app" not in text(page)
    assert "<b>" not in page.content.decode()
    stranger = log_in("view_idempotencyrecord").get(address(about))
    assert "201 Created" not in text(stranger)


def test_an_answer_that_is_no_text_is_shown_in_part(memory: Store, operator: Client) -> None:
    about = of_user("a", 17)
    settle(
        memory, claim(memory, about), stored=response(b"\xff", headers="Content-Type: image/png")
    )
    assert "Content-Type: image/png \ufffd" in text(operator.get(address(about)))


def test_the_error_of_a_view_is_shown(memory: Store, operator: Client) -> None:
    about = of_user("a", 17)
    error = ResponseCodec("", 0).dump_error(FailedByOperator("given up"))
    settle(memory, claim(memory, about), State.FAILED, error)
    assert "FailedByOperator: given up" in text(operator.get(address(about)))
