"""Results and errors for people: read only as the app accepts them, never more of them than fits a page."""

from __future__ import annotations

import json
import logging
import pprint
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.codec import TaskCodec
from celery_idempotent.celery.registry import definition_of
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.protocol.options import Policy
from celery_idempotent.records import Identity, Record, Stored
from celery_idempotent.serializers import LARGEST

if TYPE_CHECKING:
    from celery import Celery

logger = logging.getLogger(__name__)

#: So many characters of a value are shown.
LONGEST = 10_000

#: Bodies of more bytes are not even read.
_LARGEST = 1024 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A value as text; ``trouble`` says why there is none, ``cut`` that there is more of it."""

    text: str = ""
    trouble: str = ""
    cut: bool = False


def shown(app: Celery, record: Record) -> Shown:
    """Return what a settled record says: its result or its error."""
    stored = record.value
    if stored is None or record.replaced:
        return Shown(trouble="It was not kept in the record.")
    if too_large(stored):
        return Shown(trouble=f"It is too large to be shown: {len(stored.body):,} bytes.")
    try:
        codec = _codec(app, record)
        if record.state.is_failure:
            return text_of(codec.load_error(stored))
        return text_of(codec.load_value(stored))
    except IdempotencyError as error:
        return Shown(trouble=str(error))
    except Exception as error:  # noqa: BLE001  what a stored value does when it is read is not ours
        return Shown(trouble=f"It cannot be read ({type(error).__name__}).")


def error_name(app: Celery, record: Record) -> str:
    """Return the name of the exception that a FAILED record has, ``""`` if there is none that can be read."""
    stored = record.value
    if not record.state.is_failure or stored is None or too_large(stored):
        return ""
    try:
        return type(_codec(app, record).load_error(stored)).__name__
    except Exception as error:  # noqa: BLE001  what a stored value does when it is read is not ours
        logger.debug("idempotency: the error of %s cannot be read: %r", record.identity, error)
        return ""


def value_from_json(app: Celery, identity: Identity, text: str | bytes) -> Stored:
    """Return the value that somebody gives for a key, or for one of its steps, as its task would write it.

    Raises:
        ValueError: if it is no JSON, if no task of this app has that namespace, or if the task cannot write it.
    """
    definition = definition_of(app, identity.namespace, load=True)
    if definition is None:
        raise ValueError(
            f"no task of this app has the namespace {identity.namespace}, so nobody here knows how a value of it is"
            " written: only the key of a task can be completed."
        )
    if len(text) > LARGEST:
        raise ValueError(f"the value is longer than {LARGEST:,} bytes.")
    try:
        value = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        problem = f"the value is no JSON ({error}). A text stands in quotes: '\"ch_17\"'."
        raise ValueError(problem) from None
    return definition.codec.dump_given(value)


def _no_constant(name: str) -> object:
    raise ValueError(f"{name} is none of its numbers")


def text_of(value: object) -> Shown:
    """Return a value as people read it."""
    if isinstance(value, BaseException):
        text = f"{type(value).__name__}: {value}"
    elif isinstance(value, str):
        text = value
    else:
        text = pprint.pformat(value, width=100)
    return Shown(text=text[:LONGEST], cut=len(text) > LONGEST)


def _codec(app: Celery, record: Record) -> TaskCodec:
    namespace = record.identity.namespace
    definition = definition_of(app, namespace, load=True)
    return TaskCodec(app, namespace, Policy()) if definition is None else definition.codec


def too_large(stored: Stored) -> bool:
    """Is this more than is read for people?"""
    return len(stored.body) > _LARGEST
