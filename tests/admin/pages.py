"""Addresses of the admin's pages, what is on them, and what an operator does there."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable
from typing import Any

from django.test import Client

from celery_idempotent.records import Identity
from tests.support.admin import identity as identity_of

__all__ = [
    "LIST",
    "OPERATE",
    "OVERVIEW",
    "address",
    "ask",
    "confirm",
    "fields",
    "keys",
    "marks",
    "said",
    "text",
]

OVERVIEW = "/admin/celery_idempotent/idempotencyrecord/"
LIST, OPERATE = f"{OVERVIEW}records/", f"{OVERVIEW}operation/"


def address(about: Identity | str) -> str:
    """The address of the page of a record."""
    from django.contrib.admin.utils import quote
    from django.urls import reverse

    from celery_idempotent.django.admin.audit import unparse

    identity = identity_of(about) if isinstance(about, str) else about
    name = "admin:celery_idempotent_idempotencyrecord_change"
    return reverse(name, args=(quote(unparse(identity)),))


def text(answer: Any) -> str:
    """What a page says, in one line."""
    body = re.sub(r"<wbr>|<(script|style)\b.*?</\1>", "", answer.content.decode(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def keys(answer: Any) -> set[str]:
    """The keys that a list shows."""
    return {row.record.identity.key for row in answer.context_data["rows"]}


def marks(page: Any) -> dict[str, str]:
    """By its key what stands behind the box of each record in a list."""
    return {row.record.identity.key: row.mark for row in page.context_data["rows"]}


def ask(
    browser: Client,
    operation: str,
    chosen: Iterable[str] | None = None,
    *,
    one: Identity | str | None = None,
    query: str = "",
) -> Any:
    """Press a button on the page of ``one`` record, or choose records in the list, by default all, and press Go."""
    if one is not None:
        page: Any = browser.get(address(one))
        sent = {"operation": operation, "record": page.context_data["row"].mark}
        return browser.post(f"{OPERATE}?one=1", sent)
    found = marks(browser.get(f"{LIST}{query}"))
    ticked = [found[key] for key in (found if chosen is None else chosen)]
    return browser.post(f"{OPERATE}{query}", {"operation": operation, "record": ticked})


def fields(page: Any) -> dict[str, Any]:
    """What the question about an operation would send, but for the choices of the operator."""
    sent: dict[str, Any] = {}
    body = page.content.decode()
    form = body[body.index('<form method="post" class="idem-operation"') :]
    form = form[: form.index("</form>")]
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form):
        sent.setdefault(name, []).append(html.unescape(value))
    sent.pop("csrfmiddlewaretoken", None)
    return sent


def confirm(browser: Client, question: Any, **given: Any) -> Any:
    """Say yes to a question."""
    sent = {**fields(question), "reason": "a test", **given}
    return browser.post(question.wsgi_request.get_full_path(), sent)


def said(browser: Client, answer: Any) -> str:
    """What the page says to which an operation leads back."""
    assert answer.status_code == 302
    return text(browser.get(answer["Location"]))
