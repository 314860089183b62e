"""Records of views in the admin: their answers are shown, their keys found, their namespace and scopes offered."""

from __future__ import annotations

from collections.abc import Callable

from django.test import Client

from celery_idempotent.errors import FailedByOperator
from celery_idempotent.http.answers import ResponseCodec
from celery_idempotent.keys.rules import canonical
from celery_idempotent.records import Identity, State, Stored
from celery_idempotent.stores import Store
from tests.admin.pages import address, text
from tests.support.admin import claim, settle


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
