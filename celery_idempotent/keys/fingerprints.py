"""The canonical form of arguments, equal before and after the broker, and its digest.

A publisher has Python objects, a worker has what JSON made of them. Both must come to one form::

    charge((1, 2))         the publisher          [1,2]
    charge([1, 2])         the worker, by JSON    [1,2]     the same
    charge([1, 2.0])       another call           [1,2.0]   JSON keeps int and float apart, so it is another one
    charge({"b": 1, "a": None})                   {"a":null,"b":1}    keys are sorted

``repr`` of an object is never part of it: that may have an address, which differs from process to process. A value of a
type that neither kombu's JSON nor pickle carries in a known way has no form (:class:`NoFormError`).
"""

from __future__ import annotations

import dataclasses
import enum
import hashlib
import json
import re
from collections.abc import Callable
from datetime import timedelta
from itertools import accumulate, repeat
from json.encoder import encode_basestring_ascii
from typing import Final

from kombu.utils.json import JSONEncoder

from celery_idempotent.keys.arguments import type_name
from celery_idempotent.records import FINGERPRINT_BYTES

#: An argument that is nested deeper has no form: forms are written by recursion, below the frames of the caller.
MAX_DEPTH: Final = 200

#: Writes a text as JSON does, in ASCII.
quote = encode_basestring_ascii

_kombu_reduce: Callable[[object], object] = JSONEncoder().default

#: Writes the form of most values, in C. It sorts keys as they are: 9 before 10, which are texts behind the broker.
_encode = json.JSONEncoder(
    check_circular=False, sort_keys=True, separators=(",", ":"), default=_kombu_reduce
).encode
#: A key that may have been a number.
_CONVERTED_KEY = re.compile(r'"(?:-?[0-9][^"]*|-?Infinity|NaN)":')
#: Finds what looks like one, or like an element of a list, in a fifth of the time.
_NUMBERS = bytes.maketrans(b"{-0123456789IN", b",0000000000000")
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"')
_STEPS = {ord("{"): 1, ord("["): 1, ord("}"): -1, ord("]"): -1}
_NO_BRACKETS = bytes({*range(128)} - _STEPS.keys())


class NoFormError(Exception):
    """Why a value has no canonical form, as the end of a sentence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Written:
    """A form that is written already: as a part of a value it goes in as it is."""

    form: str


def form(value: object) -> str:
    """Return the canonical form of an argument: ASCII, and equal before and after the broker.

    What JSON makes equal is equal (a tuple and a list; the keys 1 and "1"), all else is distinct (1, 1.0, True, "1"):
    the publisher has ``charge((1, 2))``, the worker reads ``charge([1, 2])``, and both have one fingerprint. Types that
    kombu's JSON encodes, registered ones included, go through its encoding.

    The time grows with the size of the value alone: clients choose what is nested in what.

    Raises:
        NoFormError: if it has none, or an argument is nested deeper than :data:`MAX_DEPTH`.
    """
    try:
        text = _encode(value)
        numbers = b',"0' in text.encode().translate(_NUMBERS) and _CONVERTED_KEY.search(text)
        if not numbers and not (len(text) > 2 * MAX_DEPTH and _is_deep(text)):
            return text
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return _write(value, MAX_DEPTH + 1)  # the arguments are in a mapping, which is one level
    except RecursionError:
        raise NoFormError("it contains itself, or is nested too deeply") from None


def _is_deep(text: str) -> bool:
    """Is this JSON nested too deep?"""
    if len(text.encode().translate(None, _NO_BRACKETS)) <= 2 * MAX_DEPTH:
        return False
    brackets = _STRING.sub("", text).encode().translate(None, _NO_BRACKETS)
    return max(accumulate(map(_STEPS.__getitem__, brackets))) > MAX_DEPTH + 1


def _write(value: object, depth: int) -> str:
    """Return what :data:`_encode` does, of any value that may be nested as many times as ``depth`` says."""
    if value is None or isinstance(value, (str, int, float)):
        try:
            return _encode(value)
        except ValueError:  # CPython refuses to write ints of more than 4,300 decimal digits
            return hex(value)  # type: ignore[arg-type]
    if isinstance(value, Written):
        return value.form
    if not depth:
        raise NoFormError(f"it contains itself, or is nested deeper than {MAX_DEPTH}")
    depth -= 1
    if isinstance(value, dict):
        parts = {_key(key): part for key, part in value.items()}
        written = [
            f"{quote(key) if is_text else key}:{_write(parts[key, is_text], depth)}"
            for key, is_text in sorted(parts)
        ]
        return "{" + ",".join(written) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_write, value, repeat(depth))) + "]"
    try:
        reduced = _kombu_reduce(value)
    except TypeError:
        return _write_native(value, depth)
    return _write(reduced, depth)


def _key(key: object) -> tuple[str, bool]:
    """Return the text that JSON makes of a dict's key; ``False``: it is the form of one that JSON cannot carry."""
    if isinstance(key, str):
        return str.__str__(key), True
    if key is None or isinstance(key, (int, float)):
        return json.dumps(key), True
    return form(key), False


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


def optional_form(value: object) -> str | None:
    """Return the form of a value, or None if it has none: a sentinel, for instance, is equal to itself only."""
    try:
        return form(value)
    except NoFormError:
        return None
