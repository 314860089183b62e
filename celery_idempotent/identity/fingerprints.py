"""The canonical form of arguments, equal before and after the broker, and its digest.

A publisher has Python objects, a worker has what JSON made of them. Both must come to one form::

    charge((1, 2))         the publisher          [0x1,0x2]
    charge([1, 2])         the worker, by JSON    [0x1,0x2]     the same
    charge([1, 2.0])       another call           [0x1,2.0]     JSON keeps int and float apart, so it is another one
    charge({"b": 1, "a": None})                   {"a":None,"b":0x1}    keys are sorted

``repr`` of an object is never part of it: that may have an address, which differs from process to process. A value of a
type that neither kombu's JSON nor pickle carries in a known way has no form (:class:`NoFormError`).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
from collections.abc import Callable
from datetime import timedelta
from itertools import repeat
from json.encoder import encode_basestring_ascii
from typing import Any, Final

from kombu.utils.json import JSONEncoder

from celery_idempotent.identity.arguments import type_name
from celery_idempotent.records import FINGERPRINT_BYTES

#: A value that is nested deeper has no form: forms are written by recursion, below the frames of the caller.
MAX_DEPTH: Final = 200

#: Writes a text as JSON does, in ASCII.
quote = encode_basestring_ascii

_kombu_reduce: Callable[[object], object] = JSONEncoder().default


class NoFormError(Exception):
    """Why a value has no canonical form, as the end of a sentence."""


class Written(str):
    """A form that is written already: as a part of a value it goes in as it is."""

    __slots__ = ()


#: Values without parts, by their exact type. Numbers in hex: CPython refuses to write ints of more than 4,300 decimal
#: digits.
_WRITERS: Final[dict[type, Callable[[Any], str]]] = {
    str: quote,
    int: hex,
    float: float.__repr__,
    bool: repr,
    type(None): repr,
    Written: str,
}


def form(value: object) -> str:
    """Return the canonical form of an argument: ASCII, and equal before and after the broker.

    What JSON makes equal is equal (a tuple and a list; the keys 1 and "1"), all else is distinct (1, 1.0, True, "1"):
    the publisher has ``charge((1, 2))``, the worker reads ``charge([1, 2])``, and both have one fingerprint. Types that
    kombu's JSON encodes, registered ones included, go through its encoding.

    The time grows with the size of the value alone: clients choose what is nested in what.

    Raises:
        NoFormError: if it has none, or is nested deeper than :data:`MAX_DEPTH`.
    """
    return _write(value, MAX_DEPTH)


def _write(value: object, depth: int) -> str:
    """Return the form of a value that may be nested as many times as ``depth`` says."""
    writer = _WRITERS.get(type(value))
    if writer is not None:
        return writer(value)
    if not depth:
        raise NoFormError(f"it contains itself, or is nested deeper than {MAX_DEPTH}")
    depth -= 1
    if isinstance(value, dict):
        if not value:
            return "{}"
        forms = {quote(k) if type(k) is str else _key_form(k): v for k, v in value.items()}
        return "{" + ",".join([f"{key}:{_write(forms[key], depth)}" for key in sorted(forms)]) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_write, value, repeat(depth))) + "]" if value else "[]"
    for plain in (str, int, float):
        if isinstance(value, plain):  # of a subclass JSON writes the plain value
            return _WRITERS[plain](value)
    try:
        reduced = _kombu_reduce(value)
    except TypeError:
        return _write_native(value, depth)
    return _write(reduced, depth)


def _key_form(key: object) -> str:
    """Return the form of a dict's key: JSON writes numbers and constants as strings."""
    if isinstance(key, str):
        return quote(key)
    if key is None or isinstance(key, (int, float)):
        return quote(json.dumps(key))
    return form(key)


def _write_native(value: object, depth: int) -> str:
    """Return the form of a value that JSON cannot carry, but pickle can."""
    content: object
    if isinstance(value, (set, frozenset)):
        return f"<set {','.join(sorted(map(_write, value, repeat(depth))))}>"
    if isinstance(value, timedelta):
        content = [value.days, value.seconds, value.microseconds]
    elif isinstance(value, enum.Enum):
        content = value.value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        content = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif callable(dump := getattr(type(value), "model_dump", None)):  # pydantic
        try:
            content = dump(value, mode="json")
        except Exception as error:
            raise NoFormError(f"a model {type_name(value)} cannot be dumped") from error
    else:
        raise NoFormError(f"a value of type {type_name(value)} has no canonical form")
    return f"<{quote(type(value).__qualname__)} {_write(content, depth)}>"


def fingerprint_of(text: str) -> bytes:
    """Return the fingerprint of a canonical form."""
    return hashlib.sha256(text.encode("ascii")).digest()[:FINGERPRINT_BYTES]


def default_form(default: object) -> str | None:
    """Return the form of a parameter's default, or None if it has none."""
    try:
        return form(default)
    except (NoFormError, RecursionError):  # a sentinel, for instance: equal to itself only
        return None
