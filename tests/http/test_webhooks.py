"""Webhooks of ten providers, as the page has them: each event takes effect once, however often it is delivered."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import pytest
from celery import Celery
from django.http import HttpResponse
from django.test import RequestFactory

from celery_idempotent import IdempotentTask
from celery_idempotent.django.http import enqueue, keyed_view
from tests.http.callers import DOORS, Call, open_client
from tests.http.sites import new_key
from tests.support.paths import ROOT

pytestmark = pytest.mark.usefixtures("django")

PAGE = ROOT / "docs" / "webhooks.md"

app = Celery("webhooks", broker="memory://", set_as_current=False)
app.conf.update(idempotency_store="memory://", task_always_eager=True)


class Told(NamedTuple):
    status: int
    body: bytes
    replayed: bool


#: Sends headers and a body.
Deliver = Callable[[dict[str, str], bytes], Told]


class Receiver:
    """One receiver of webhooks behind each door."""

    def __init__(self, door: str) -> None:
        self.door, self.runs = door, list[bytes]()

    def guard(self, key: Any, **options: Any) -> Deliver:
        """Return what delivers to a receiver whose ``key`` is a header, or in a body: ``key(body)``."""

        def of_body(request: Any, body: bytes | None = None) -> Any:
            return key(request.body if body is None else body)

        found = of_body if callable(key) else key
        given = {"key": found, "scope": lambda _: "sender", "fingerprint": lambda *_: None}
        client = open_client(self.door, self._handle, **{**given, **options})

        def deliver(headers: dict[str, str], body: bytes) -> Told:
            answer = client.ask(None, body, **headers)
            return Told(answer.status, answer.body, answer.replayed)

        return deliver

    def _handle(self, call: Call) -> Any:
        self.runs.append(call.body)
        return 202, [("Content-Type", "text/plain")], [b"run %d" % len(self.runs)]


@pytest.fixture(params=DOORS)
def receiver(request: pytest.FixtureRequest) -> Receiver:
    return Receiver(request.param)


class Sent(NamedTuple):
    """A delivery of event 1, its repetition, and a delivery of event 2."""

    first: tuple[dict[str, str], Any]
    again: tuple[dict[str, str], Any]
    other: tuple[dict[str, str], Any]


def adyen(reference: str, date: str) -> Any:
    amount = {"currency": "EUR", "value": 1130}
    item = {"pspReference": reference, "eventCode": "AUTHORISATION", "eventDate": date}
    item |= {"success": "true", "merchantAccountCode": "Shop", "amount": amount}  # type: ignore[dict-item]
    return {"live": "false", "notificationItems": [{"NotificationRequestItem": item}]}


def by_header(name: str, body: Any, again: dict[str, str] | None = None) -> Sent:
    """Return deliveries whose event is named by a header; a repetition has others ``again``."""
    first, other = ({name: new_key()} for _ in range(2))
    return Sent((first, body), ({**first, **(again or {})}, body), (other, body))


def by_body(name: str, body: dict[str, Any], again: dict[str, Any], **headers: str) -> Sent:
    """Return deliveries whose event is named in the body; a repetition differs in the body and the headers."""
    event = {**body, name: f"evt_{new_key()}"}
    other = {**body, name: f"evt_{new_key()}"}
    more = {key.replace("_", "-"): value for key, value in headers.items()}
    return Sent(({}, event), (more, {**event, **again}), ({}, other))


STRIPE = {"object": "event", "type": "charge.succeeded", "pending_webhooks": 2, "data": {}}
SLACK = {"type": "event_callback", "team_id": "T1", "event": {"type": "app_mention"}}
SNS = {"Type": "Notification", "MessageId": "22b80b92", "Message": "Hi", "Signature": "EXAMPLE"}

SENT: dict[str, Callable[[], Sent]] = {
    "Adyen": lambda: Sent(
        ({}, adyen("7914073381342284", "2026-01-01T10:00:00+01:00")),
        ({}, adyen("7914073381342284", "2026-01-01T10:02:00+01:00")),
        ({}, adyen("8815443381342284", "2026-01-01T10:00:00+01:00")),
    ),
    "Amazon SNS": lambda: by_header("X-Amz-Sns-Message-Id", SNS),
    "GitHub": lambda: by_header("X-GitHub-Delivery", {"zen": "Design for failure.", "hook_id": 1}),
    "GitLab": lambda: by_header("Idempotency-Key", {"object_kind": "push", "project_id": 15}),
    "PayPal": lambda: by_body(
        "id", {"event_type": "PAYMENT.SALE.COMPLETED"}, {}, PayPal_Transmission_Id="of-the-second"
    ),
    "Shopify": lambda: by_header("X-Shopify-Event-Id", {"id": 820982911946154508}),
    "Slack": lambda: by_body("event_id", SLACK, {}, X_Slack_Retry_Num="1"),
    "Square": lambda: by_body("event_id", {"type": "payment.updated"}, {}, Square_Retry_Number="1"),
    "Standard Webhooks (Svix and others)": lambda: by_header(
        "Webhook-Id", {"type": "user.created"}, {"Webhook-Timestamp": "1674087231"}
    ),
    "Stripe": lambda: by_body("id", STRIPE, {"pending_webhooks": 1}, Stripe_Signature="t=2"),
}


def rows() -> dict[str, str]:
    """Return the providers of the page, and their keys."""
    table = PAGE.read_text().partition("## Ten providers")[2]
    cells = [line.split(" | ") for line in table.splitlines() if line.startswith("| ")]
    return {row[0].removeprefix("| "): row[1].strip("`") for row in cells[1:]}


def key_of(cell: str) -> Any:
    """Return the option ``key`` that a cell of the page says: a header, or a function of a body."""
    if cell.startswith('"'):
        return json.loads(cell)
    code = compile(cell, str(PAGE), "eval")
    return lambda body: eval(code, {"event": json.loads(body)})


@pytest.mark.parametrize("provider", rows())
def test_an_event_that_is_delivered_twice_takes_effect_once(
    receiver: Receiver, provider: str
) -> None:
    deliver = receiver.guard(key_of(rows()[provider]))
    first, again, other = (
        (headers, json.dumps(body).encode()) for headers, body in SENT[provider]()
    )
    assert deliver(*first) == Told(202, b"run 1", replayed=False)
    assert deliver(*again) == Told(202, b"run 1", replayed=True)
    assert deliver(*other) == Told(202, b"run 2", replayed=False)
    assert receiver.runs == [first[1], other[1]]


# What is no key -------------------------------------------------------------------------------------------------------


BROKEN = {
    "no JSON": b"{",
    "no such field": b'{"type": "x"}',
    "another shape": b"[]",
    "a number": b"5",
    "an empty id": b'{"id": ""}',
    "an id that cannot be one": b'{"id": {"a": 1}}',
    "a long id": b'{"id": "%s"}' % (b"x" * 256),
}


@pytest.mark.parametrize("case", BROKEN)
def test_where_the_function_finds_no_key_it_is_400_and_nothing_runs(
    receiver: Receiver, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    deliver = receiver.guard(lambda body: json.loads(body)["id"])
    told = deliver({}, BROKEN[case])
    assert (told.status, json.loads(told.body)["code"]) == (400, "idempotency_key_invalid")
    assert receiver.runs == []
    assert "finds no key in a request" in caplog.text
    assert "xxx" not in caplog.text


@pytest.mark.parametrize("key", ["X-Own", lambda body: json.loads(body).get("id")])
def test_without_a_key_that_is_not_required_it_just_runs(receiver: Receiver, key: Any) -> None:
    assert receiver.guard(key)({}, b"{}").status == 400
    deliver = receiver.guard(key, required=False)
    assert [deliver({}, b"{}").body for _ in range(2)] == [b"run 1", b"run 2"]
    given: tuple[dict[str, str], bytes] = (
        {"X-Own": new_key()},
        b'{"id": "%s"}' % new_key().encode(),
    )
    assert [deliver(*given).body for _ in range(2)] == [b"run 3", b"run 3"]
    assert receiver.runs == [b"{}", b"{}", given[1]]


def test_a_body_over_the_limit_does_not_reach_the_function(receiver: Receiver) -> None:
    seen: list[bytes] = []
    deliver = receiver.guard(seen.append, max_request_bytes=10)
    assert deliver({}, b"x" * 11).status == 413
    assert seen == []


@pytest.mark.parametrize("found", [str, lambda key: ("evt", key)])
def test_a_task_has_the_key_that_the_view_finds(found: Callable[[str], Any]) -> None:
    runs, factory = list[str](), cast("Any", RequestFactory())

    @app.task(base=IdempotentTask, shared=False, name=f"webhooks.book.{new_key()}")
    def book(event: str) -> str:
        runs.append(event)
        return event

    @keyed_view(key=lambda r: found(json.loads(r.body)["id"]), scope=lambda _: "sender")
    def hook(request: Any) -> HttpResponse:
        return enqueue(request, book, (request.idempotency_key,))

    def deliver(body: bytes) -> HttpResponse:
        return hook(factory.generic("POST", "/", body))

    answers = [deliver(b'{"id": "e1", "n": %d}' % number) for number in range(2)]
    assert [each.status_code for each in answers] == [202, 200]
    assert deliver(b'{"id": "e2"}').status_code == 202
    assert len(runs) == 2
    assert deliver(b"{}").status_code == 400


# The page -------------------------------------------------------------------------------------------------------------


def test_the_examples_of_the_page_work() -> None:
    books = SimpleNamespace(
        booked=[], is_signed=lambda request: "Stripe-Signature" in request.headers
    )
    books.book = lambda event: books.booked.append(event["id"])
    factory: Any = RequestFactory()
    of_django, of_others = (
        block.partition("```")[0] for block in PAGE.read_text().split("```python\n")[1:]
    )
    page: dict[str, Any] = {"__name__": "page", "book": books.book, "is_signed": books.is_signed}
    exec(of_django.replace("from shop.books import book, is_signed\n", ""), page)

    def deliver(**headers: str) -> Any:
        body = b'{"id": "evt_1", "pending_webhooks": %d}' % len(headers)
        return page["stripe"](factory.generic("POST", "/", body, **headers))

    assert deliver().status_code == 403
    answers = [deliver(HTTP_STRIPE_SIGNATURE="t=1", **more) for more in ({}, {"HTTP_X": "1"})]
    assert [(each.status_code, each.content) for each in answers] == [(200, b"booked")] * 2
    assert books.booked == ["evt_1"]

    exec(of_others, page)
    client = open_client("asgi", lambda call: (200, [], [call.body]), **page["STRIPE"])
    bodies = (b'{"id": "evt_1", "pending_webhooks": 2}', b'{"id": "evt_1"}')
    told = [client.ask(None, body, path="/webhooks/stripe").body for body in bodies]
    assert told == [bodies[0]] * 2
