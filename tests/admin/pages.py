"""Addresses of the admin's pages, and what is on them."""

from __future__ import annotations

import html
import re
from typing import Any

from celery_idempotent.records import Identity
from tests.support.admin import identity as identity_of

__all__ = ["LIST", "address", "fields", "keys", "text"]

LIST = "/admin/celery_idempotent/idempotencyrecord/"


def address(about: Identity | str, page: str = "change") -> str:
    """The address of a page about a record."""
    from django.contrib.admin.utils import quote
    from django.urls import reverse

    from celery_idempotent.django.admin.audit import unparse

    identity = identity_of(about) if isinstance(about, str) else about
    name = f"admin:celery_idempotent_idempotencyrecord_{page}"
    return reverse(name, args=(quote(unparse(identity)),))


def text(answer: Any) -> str:
    """What a page says, in one line."""
    body = re.sub(r"<wbr>|<(script|style)\b.*?</\1>", "", answer.content.decode(), flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", body)).split())


def keys(answer: Any) -> set[str]:
    """The keys that a list shows."""
    return {record.identity.key for record, *_ in answer.context_data["rows"]}


def fields(page: Any) -> dict[str, Any]:
    """What the form of an operation would send, but for the choices of the operator."""
    sent: dict[str, Any] = {}
    body = page.content.decode()
    form = body[body.index('<form method="post" class="idem-operation"') :]
    form = form[: form.index("</form>")]
    for name, value in re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', form):
        sent.setdefault(name, []).append(html.unescape(value))
    sent.pop("csrfmiddlewaretoken", None)
    if "again" in page.context_data["form"].fields:
        sent |= {"again": ["on"], "reason": ["a test"]}
    return sent
