"""The stored answers of views, beside what tasks leave (:mod:`celery_idempotent.celery.story`)."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from celery_idempotent.celery.story import Shown, is_too_large, show_value
from celery_idempotent.django.http.messages import CONTENT_TYPE, REPLAYED, read_response
from celery_idempotent.errors import ResultUnavailable
from celery_idempotent.records import Record, Stored

if TYPE_CHECKING:
    from celery import Celery


def shown_with_responses(app: Celery, record: Record) -> Shown:
    """Return what a settled record says: its result, its error, or its view's answer."""
    stored = record.value
    response = stored is not None and stored.content_type == CONTENT_TYPE
    if stored is None or not response or is_too_large(stored):
        return show_value(app, record)
    return _response(stored)


def _response(stored: Stored) -> Shown:
    """Return the answer of a view: its status, its headers, and its body if that is a text."""
    try:
        response = read_response(stored)
    except ResultUnavailable as unavailable:
        return Shown(trouble=str(unavailable))
    del response[REPLAYED]
    body = f"({len(response.content):,} bytes that are no text)"
    if "Content-Encoding" not in response:
        with contextlib.suppress(UnicodeDecodeError, LookupError):
            body = response.content.decode(response.charset)
    head = [f"{response.status_code} {response.reason_phrase}"]
    head += [f"{name}: {value}" for name, value in response.items()]
    return Shown.of("\n".join([*head, "", body]))
