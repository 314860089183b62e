"""Results and errors for people: read only as the app accepts them, never more of them than fits a page."""

from __future__ import annotations

import contextlib
import pprint
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.django.http.messages import CONTENT_TYPE, REPLAYED, read_response
from celery_idempotent.errors import IdempotencyError, ResultUnavailable
from celery_idempotent.protocol.policy import Policy
from celery_idempotent.records import Record, State, Stored

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.celery.definition import Definition

#: So many characters of a value are shown.
LONGEST = 10_000

#: Bodies of more bytes are not even read; compressed ones may hold a thousand times as much.
_LARGEST, _LARGEST_COMPRESSED = 1024 * 1024, 16 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A value as text; ``trouble`` says why there is none, ``cut`` that there is more of it."""

    text: str = ""
    trouble: str = ""
    cut: bool = False


def shown(app: Celery, definition: Definition | None, record: Record) -> Shown:
    """Return what a settled record says: its result or its error."""
    stored = record.value
    if stored is None or record.replaced:
        return Shown(trouble="It was not kept in the record.")
    if len(stored.body) > _limit(stored):
        return Shown(trouble=f"It is too large to be shown: {len(stored.body):,} bytes.")
    if stored.content_type == CONTENT_TYPE:
        return _response(stored)
    codec = (
        TaskCodec(app, record.identity.namespace, Policy())
        if definition is None
        else definition.codec
    )
    try:
        if record.state is State.FAILED:
            error = codec.load_error(stored)
            return text_of(error)
        return text_of(codec.load_value(stored))
    except IdempotencyError as error:
        return Shown(trouble=str(error))
    except Exception as error:  # noqa: BLE001  what a stored value does when it is read is not ours
        return Shown(trouble=f"It cannot be read ({type(error).__name__}).")


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
    return text_of("\n".join([*head, "", body]))


def text_of(value: object) -> Shown:
    """Return a value as people read it."""
    if isinstance(value, BaseException):
        text = f"{type(value).__name__}: {value}"
    elif isinstance(value, str):
        text = value
    else:
        text = pprint.pformat(value, width=100)
    return Shown(text=text[:LONGEST], cut=len(text) > LONGEST)


def _limit(stored: Stored) -> int:
    return _LARGEST_COMPRESSED if stored.compression else _LARGEST
