"""What is read of a request, whatever the framework: its key, its caller, its body and its fingerprint.

The body is received whole before anything is claimed. A client that stops halfway has asked for nothing::

    Content-Length: 11    amount=1000      whole: it goes on
    Content-Length: 11    amount=1 ─ ✗     body_incomplete: nothing is claimed, and one euro is not paid

The fingerprint is equal for every way to write the same body::

    {"amount": 1.50, "to": 7}     one fingerprint: the same members and numbers,
    {"to":7,"amount":1.5}         in another order, written in another way
    text/plain, one more blank    another: bytes that mean nothing to us count as they are
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from functools import cache, lru_cache
from typing import Any, Final
from urllib.parse import parse_qs

from celery_idempotent.errors import InvalidKey
from celery_idempotent.http.answers import RequestRefused
from celery_idempotent.keys.fingerprints import NoFormError, Written, fingerprint_of, form, quote
from celery_idempotent.keys.rules import canonical
from celery_idempotent.keys.stamp import MAX_CHARS
from celery_idempotent.records import Identity

logger = logging.getLogger(__name__)

#: The scope of ASGI, or the environ of WSGI, which Django's requests have too.
Request = MutableMapping[str, Any]


def read_header(request: Request, name: str, separator: str = ",") -> str | None:
    """Return the value of a header, all values if it was sent more than once; ``None`` without it."""
    for_wsgi, raw = _spellings(name)
    if "headers" not in request:  # WSGI
        return request.get(for_wsgi)
    found = [value.decode("latin-1") for each, value in request["headers"] if each == raw]
    return separator.join(found) if found else None


@cache
def _spellings(name: str) -> tuple[str, bytes]:
    """Return the names of a header in an environ of WSGI, and in a scope of ASGI."""
    key = name.upper().replace("-", "_")
    return (key if key == "CONTENT_TYPE" else f"HTTP_{key}"), name.lower().encode()


# -- the key -----------------------------------------------------------------------------------------------------------

#: Nothing longer is looked at: a key of 255 characters, each of them escaped, its quotes, and some parameters.
MAX_HEADER_CHARS: Final = 1024

_QUOTED = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
#: Visible ASCII but what begins, separates or escapes something in a structured field.
_BARE = r"([!#-+\--:<-\[\]-~]*)"
#: Or a string of RFC 9651, whose parameters mean nothing here. No comma is behind it: servers join two headers
#: with one.
_HEADER: Final = re.compile(rf" *(?:{_BARE}|({_QUOTED})(?:; *[a-z*][ -+\--~]*)?) *")


def read_key(raw: object, *, required: bool = False, name: str = "Idempotency-Key") -> str | None:
    r"""Return the key that a header means: ``"a\"b"`` is ``a"b``, ``17`` is ``"17"``; ``None`` without a header.

    Raises:
        RequestRefused: ``idempotency_key_missing``, if it is ``required``; ``idempotency_key_invalid``, if the header
            is malformed, empty, doubled or too long. Its text says what is wrong and never repeats the value.
    """
    if raw is None:
        if not required:
            return None
        raise RequestRefused(
            "idempotency_key_missing",
            f"Send a header {name} with a value that is new for each intention, such as a UUID, and the same when you "
            "try again.",
        )
    if not isinstance(raw, str) or len(raw) > MAX_HEADER_CHARS:
        raise _invalid(f"It has more than {MAX_HEADER_CHARS} characters.")
    found = _HEADER.fullmatch(raw)
    if found is None:
        raise _invalid(
            'It is neither one string of RFC 9651, such as "8e03978e-40d5", nor one bare value of printable ASCII, '
            'which has no spaces and none of " , ; and \\.'
        )
    key = found[1]
    if key is None:
        key = re.sub(r"\\(.)", r"\1", found[2][1:-1])
    if not key:
        raise _invalid("It is empty.")
    # With each of its characters escaped, and two quotes. A shorter one cannot be too long.
    if 2 * len(key) + 2 > MAX_CHARS:
        try:
            canonical(key, task="of a request")
        except InvalidKey as error:
            raise _invalid(f"It{str(error).partition('of a request')[2]}") from None
    return key


def _invalid(why: str) -> RequestRefused:
    return RequestRefused("idempotency_key_invalid", why)


def http_identity(namespace: str, scope: object, key: object) -> Identity:
    """Return the identity of a key of a caller: no caller sees a record of another.

    Raises:
        InvalidKey: if the key cannot be one, which :func:`read_key` refuses.
        RequestRefused: ``caller_unknown``, without a scope, or if it cannot be one: it often comes from the request,
            too. All callers in one scope would hand one visitor the answers of another.
    """
    if scope is None:
        raise RequestRefused("caller_unknown", "Log in, or send credentials.")
    text = canonical(key, task=namespace)
    try:
        whose = canonical(scope, what="scope", task=namespace)
    except InvalidKey as error:
        logger.warning("idempotency: a caller is refused: %s", error)
        raise RequestRefused(
            "caller_unknown", "The request does not identify its sender."
        ) from None
    return Identity(namespace=namespace, scope=whose, key=text)


# -- the body ----------------------------------------------------------------------------------------------------------

#: The form of a query string without fields.
_NO_QUERY: Final = form({})
_BOUNDARY: Final = re.compile(r'; *boundary=(?:"([^"]+)"|([^";, ]+))', re.IGNORECASE)


def declared_size(content_length: object, *, max_bytes: int) -> int:
    """Return the size of a body that its ``Content-Length`` declares, 0 without one; refuse one over the limit."""
    text = str(content_length or "0").strip(" \t")
    if not text.isdecimal() or len(text) > 18:
        raise RequestRefused("body_unreadable", "Its Content-Length is not a number.")
    size = int(text)
    if size > max_bytes:
        check_size(size, size, max_bytes=max_bytes)
    return size


def check_size(size: int, declared: int, *, max_bytes: int) -> None:
    """Compare the size of a body that was received, -1 if the client hung up, with the one declared.

    A WSGI server reports no error when a body breaks off: a reader gets less, as if that were all.
    """
    if size > max_bytes:
        raise RequestRefused(
            "request_too_large", f"An idempotent request may have up to {max_bytes} bytes."
        )
    if size < declared:
        raise RequestRefused(
            "body_incomplete",
            "It is shorter than the request declares. Send the same request with the same key again.",
        )


def request_fingerprint(
    method: str, path: str, query: Mapping[str, Sequence[str]] | None, body: str
) -> bytes:
    """Return the fingerprint of a request; ``body`` is the form of its body: :func:`body_form`, or one of your own."""
    fields = form(dict(query)) if query else _NO_QUERY
    return fingerprint_of(f"{quote(method)} {quote(path)} {fields} {body}")


def fields_of(text: str) -> dict[str, list[str]]:
    """Return the fields of a query or a form, in which each character is a byte."""
    return parse_qs(text, keep_blank_values=True, encoding="latin-1") if text else {}


def body_form(content_type: str, raw: bytes) -> str:
    """Return the form of a body: of JSON its value, of a form its fields, of a multipart one the bytes of its parts."""
    kind = _kind_of(content_type)
    if kind == "application/json" or kind.endswith("+json"):
        # In UTF-8 (RFC 8259). Of a body that has no canonical form its bytes count.
        try:
            text = raw.decode().strip(" \t\r\n")
            value, end = _DECODER.raw_decode(text)
            if end == len(text):
                return f"json {form(value)}"
        except (ValueError, RecursionError, NoFormError):
            pass
    elif kind == "application/x-www-form-urlencoded":
        return f"form {form(fields_of(raw.decode('latin-1')))}"
    elif kind == "multipart/form-data" and (found := _BOUNDARY.search(content_type)):
        boundary = b"\r\n--" + (found[1] or found[2]).encode("latin-1", "replace")
        _, *parts = (b"\r\n" + raw).split(boundary)
        if parts and parts.pop().startswith(b"--"):  # it is whole
            # Sorted by their headers, so that fields of one name stay in their order.
            parts.sort(key=lambda part: part.partition(b"\r\n\r\n")[0])
            return f"multipart {form([hashlib.sha256(part).hexdigest() for part in parts])}"
    return f"raw {quote(kind)} {hashlib.sha256(raw).hexdigest()}"


@lru_cache(maxsize=64)
def _kind_of(content_type: str) -> str:
    return content_type.lower().partition(";")[0].strip()


def _number(text: str) -> float | Written:
    """Return a JSON number with a point or an exponent: ``0.1`` and ``0.10`` are one number.

    Every decimal of up to 15 digits is another float. Any other number counts as it is written.
    """
    is_exact = len(text) <= sys.float_info.dig + 1 and "e" not in text.lower()
    return float(text) if is_exact else Written(text)


_DECODER: Final = json.JSONDecoder(parse_float=_number)
