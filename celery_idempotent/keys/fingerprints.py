"""The canonical form of arguments, equal before and after the broker, and its digest.

A publisher has Python objects, a worker has the values that JSON made of them. Both have one form::

    charge((1, 2))         the publisher          [1,2]
    charge([1, 2])         the worker, by JSON    [1,2]     the same
    charge([1, 2.0])       another call           [1,2.0]   JSON keeps int and float apart
    charge({"b": 1, "a": None})                   {"a":null,"b":1}    keys are sorted

A form never contains a ``repr``, which may have an address in it. Types that kombu encodes have the form of their
encoding.
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Callable, Iterable
from datetime import timedelta
from json import encoder
from json.encoder import encode_basestring_ascii
from typing import Any

from kombu.utils.json import JSONEncoder

from celery_idempotent.keys.arguments import type_name
from celery_idempotent.records import FINGERPRINT_BYTES

quote = encode_basestring_ascii

_SCALARS: dict[type, Callable[[Any], str]] = {
    str: quote,
    int: repr,
    bool: {True: "true", False: "false"}.__getitem__,
    type(None): {None: "null"}.__getitem__,
}

_kombu_reduce: Callable[[object], object] = JSONEncoder().default

#: Writes most forms, in parts, with sorted keys. It sorts them as they are: 9 before 10, which are texts after the
#: broker. ``JSONEncoder`` makes such a writer for each value, which takes as long as the writing.
_write_parts: Callable[[Any, Any], Iterable[str]]
try:
    _write_parts = encoder.c_make_encoder(  # type: ignore[attr-defined]
        None, _kombu_reduce, quote, None, ":", ",", True, False, True
    )
except (AttributeError, TypeError):  # an interpreter that has none, or another
    _write_parts = json.JSONEncoder(
        check_circular=False, sort_keys=True, separators=(",", ":"), default=_kombu_reduce
    ).iterencode
#: A first key that may not have been a text: then no key of its dict was, or it could not be sorted.
_CONVERTED_KEY = re.compile(r'\{"(?=[-0-9INtf])(?:-?[0-9][^"]*|-?Infinity|NaN|true|false)":')


class NoFormError(Exception):
    """A value has no canonical form; the text is the end of a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A part of a value that is in canonical form already."""

    form: str


def form(value: object) -> str:
    """Return the canonical form of an argument, in ASCII, in a time that grows with its size alone.

    Values that JSON makes equal are equal (a tuple and a list; the keys 1 and "1"), all others differ.

    Raises:
        NoFormError: if it has none, contains itself, or is nested more deeply than Python's recursion limit.
    """
    try:
        if type(value) in _SCALARS:
            return _SCALARS[type(value)](value)
        text = "".join(_write_parts(value, 0))
        if not _CONVERTED_KEY.search(text):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return _write(value)
    except (ValueError, RecursionError):  # CPython writes no int of more than 4,300 digits
        raise NoFormError(
            "it contains itself, or is nested too deeply, or too long a number"
        ) from None


def _write(value: object) -> str:
    """Return the form as :data:`_write_parts` does, of every value that has one."""
    if value is None or isinstance(value, (str, int, float)):
        return "".join(_write_parts(value, 0))
    if isinstance(value, Written):
        return value.form
    if isinstance(value, dict):
        parts = {_key(key): part for key, part in value.items()}
        written = [
            f"{quote(key) if is_text else key}:{_write(parts[key, is_text])}"
            for key, is_text in sorted(parts)
        ]
        return "{" + ",".join(written) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_write, value)) + "]"
    try:
        reduced = _kombu_reduce(value)
    except TypeError:
        return _write_native(value)
    return _write(reduced)


def _key(key: object) -> tuple[str, bool]:
    """Return a dict's key as JSON has it, and True; its form and False if JSON cannot have it."""
    if isinstance(key, str):
        return str.__str__(key), True
    if key is None or isinstance(key, (int, float)):
        return json.dumps(key), True
    return form(key), False


def _write_native(value: object) -> str:
    """Return the form of a value that JSON cannot carry, but pickle can."""
    content: object
    if isinstance(value, (set, frozenset)):
        return f"<set {','.join(sorted(map(_write, value)))}>"
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
    return f"<{quote(type(value).__qualname__)} {_write(content)}>"


def fingerprint_of(text: str) -> bytes:
    """Return the fingerprint of a canonical form."""
    return hashlib.sha256(text.encode("ascii")).digest()[:FINGERPRINT_BYTES]
