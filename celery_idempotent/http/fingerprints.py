"""The fingerprint of a request: method, path, query and body, equal for every way to write the same body.

::

    {"amount": 1.50, "to": 7}     one fingerprint: the same members and numbers,
    {"to":7,"amount":1.5}         in another order, written in another way
    text/plain, one more blank    another: bytes that mean nothing to us count as they are
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Final

from celery_idempotent.keys.fingerprints import (
    NoFormError,
    Written,
    fingerprint_of,
    form,
    quote,
)

#: A float distinguishes numbers of so many digits, times ten to the power of up to so much.
_FLOAT_DIGITS, _FLOAT_POWER = sys.float_info.dig, 280

#: The form of a query string without fields.
_NO_QUERY: Final = form({})


def request_fingerprint(
    method: str, path: str, query: Mapping[str, Sequence[str]] | None, body: str
) -> bytes:
    """Return the fingerprint of a request; ``body`` is the form of its body: :func:`body_form`, or one of your own."""
    fields = form(dict(query)) if query else _NO_QUERY
    return fingerprint_of(" ".join([quote(method), quote(path), fields, body]))


def body_form(content_type: str, raw: bytes) -> str:
    """Return the form of a body that is no HTML form; ``content_type`` is in lower case, without parameters."""
    if content_type == "application/json" or content_type.endswith("+json"):
        canonical = _json(raw)
        if canonical is not None:
            return f"json {canonical}"
    return f"raw {quote(content_type)} {hashlib.sha256(raw).hexdigest()}"


def _json(raw: bytes) -> str | None:
    """Return the canonical form of a JSON body; ``None`` if it is none, or too deep for one: then its bytes count."""
    try:
        return form(_DECODER.decode(raw.decode(json.detect_encoding(raw), "surrogatepass")))
    except (ValueError, RecursionError, NoFormError):
        return None


def _number(text: str) -> float | Written:
    """Return a JSON number in a form that differs from that of every other: a float, unless it has more digits.

    Numbers of up to 15 digits are as many floats. ``0.1``, ``0.10`` and ``1e-1`` are one number.
    """
    if len(text) <= _FLOAT_DIGITS + 1 and "e" not in text and "E" not in text:
        return float(text)
    mantissa, _, exponent = text.lower().partition("e")
    whole, _, fraction = mantissa.lstrip("-").partition(".")
    padded = (whole + fraction).lstrip("0")
    digits = padded.rstrip("0")
    power = int(exponent or 0) - len(fraction) + len(padded) - len(digits)
    if not digits or (len(digits) <= _FLOAT_DIGITS and abs(power) <= _FLOAT_POWER):
        return float(text)
    return Written(f"{'-' if text.startswith('-') else ''}{digits}e{power}")


_DECODER: Final = json.JSONDecoder(parse_float=_number)
