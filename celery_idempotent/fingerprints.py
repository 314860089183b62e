"""The canonical form of arguments, equal before and after the broker, and its digest."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from json.encoder import encode_basestring_ascii as quote

from kombu.utils.json import JSONEncoder

from celery_idempotent.arguments import type_name
from celery_idempotent.records import FINGERPRINT_BYTES

__all__ = ["NoFormError", "default_form", "digest", "form", "quote"]

_kombu_reduce: Callable[[object], object] = JSONEncoder().default


class NoFormError(Exception):
    """Why a value has no canonical form, as the end of a sentence."""


def form(value: object) -> str:
    """Return the canonical form of an argument: ASCII, and equal before and after the broker.

    What JSON makes equal is equal (a tuple and a list; the keys 1 and "1"), all else is distinct
    (1, 1.0, True, "1"). Types that kombu's JSON knows, or was told of, go through its own form.
    """
    if isinstance(value, str):
        return quote(value)
    if value is None or isinstance(value, bool):
        return repr(value)
    if isinstance(value, int):
        return hex(value)  # CPython writes no int of more than 4,300 decimal digits
    if isinstance(value, float):
        return float.__repr__(value)
    if isinstance(value, dict):
        forms = {quote(k) if type(k) is str else _key_form(k): v for k, v in value.items()}
        return "{" + ",".join([f"{key}:{form(forms[key])}" for key in sorted(forms)]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join([form(item) for item in value]) + "]"
    try:
        reduced = _kombu_reduce(value)
    except TypeError:
        return _native_form(value)
    return form(reduced)


def _key_form(key: object) -> str:
    """Return the form of a dict's key: JSON writes numbers and constants as strings."""
    if isinstance(key, str):
        return quote(key)
    if key is None or isinstance(key, (int, float)):
        return quote(json.dumps(key))
    return form(key)


def _native_form(value: object) -> str:
    """Return the form of what JSON cannot carry, but pickle can."""
    content: object
    if isinstance(value, (set, frozenset)):
        return f"<set {','.join(sorted([form(item) for item in value]))}>"
    if isinstance(value, timedelta):
        content = [value.days, value.seconds, value.microseconds]
    elif isinstance(value, enum.Enum):
        content = value.value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif callable(dump := getattr(type(value), "model_dump", None)):  # pydantic
        content = dump(value)
    else:
        raise NoFormError(f"a value of type {type_name(value)} has no canonical form")
    return f"<{quote(type(value).__qualname__)} {form(content)}>"


def digest(text: str) -> bytes:
    """Return the fingerprint of a canonical form."""
    return hashlib.sha256(text.encode("ascii")).digest()[:FINGERPRINT_BYTES]


def default_form(default: object) -> str | None:
    """Return the form of a parameter's default, or None if it has none."""
    try:
        return form(default)
    except (NoFormError, RecursionError):  # a sentinel, say: only the very same object equals it
        return None
