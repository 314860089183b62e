"""Reading the ``Idempotency-Key`` header: a string of RFC 8941, or a bare value."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from celery_idempotent.django.http.problems import RequestRefused
from celery_idempotent.errors import InvalidKey
from celery_idempotent.identity.identified import MAX_CHARS
from celery_idempotent.identity.keys import canonical, excess

if TYPE_CHECKING:
    from django.http import HttpRequest

#: Nothing longer is looked at: a key of 255 characters, each of them escaped, its quotes, and some parameters.
MAX_HEADER_CHARS: Final = 1024

_META: Final = "HTTP_IDEMPOTENCY_KEY"
_KEY = r"[a-z*][a-z0-9_.*-]*"
_QUOTED = r'"((?:[ !#-\[\]-~]|\\["\\])*)"'
#: A number, a string, a token, bytes, or a boolean: what a parameter may be.
_ITEM = "|".join(
    (
        r"-?[0-9]{1,15}(?:\.[0-9]{1,3})?",
        _QUOTED.replace("((?:", "(?:(?:", 1),
        r"[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*",
        r":[A-Za-z0-9+/=]*:",
        r"\?[01]",
    )
)
#: Parameters mean nothing here, and RFC 8941 wants them ignored.
_STRING: Final = re.compile(rf"{_QUOTED}(?:; *{_KEY}(?:=(?:{_ITEM}))?)*", re.ASCII)
#: Visible ASCII but what begins, separates or escapes something in a structured field: servers join a header that was
#: sent twice with a comma.
_BARE: Final = re.compile(r"[!#-+\--:<-\[\]-~]+")


def read_key(request: HttpRequest, *, strict: bool, required: bool = False) -> str | None:
    """Return the key, ``None`` if the request has none and it is not ``required``. ``strict``: a bare value is not one.

    Raises:
        RequestRefused: ``idempotency_key_missing``; ``idempotency_key_invalid``, if the header is malformed, empty,
            doubled or too long. Its text says what is wrong and never repeats the value.
    """
    raw = request.META.get(_META)
    if raw is None and required:
        raise RequestRefused(
            "idempotency_key_missing",
            "Send a header Idempotency-Key with a value that is new for each intention, such as a UUID, and the same "
            "when you try again.",
        )
    if raw is None:
        return None
    if not isinstance(raw, str) or len(raw) > MAX_HEADER_CHARS:
        raise _invalid(f"It has more than {MAX_HEADER_CHARS} characters.")
    value = raw.strip(" ")
    if not value:
        raise _invalid("It is empty.")
    if not (value.isascii() and value.isprintable()):
        raise _invalid("It has characters other than printable ASCII.")
    key = _key_of(value, strict=strict)
    if not key:
        raise _invalid("It is empty.")
    # With each of its characters escaped, and two quotes. A shorter one cannot be too long.
    if 2 * len(key) + 2 > MAX_CHARS:
        try:
            canonical(key, task="of a request")
        except InvalidKey:
            raise _invalid(f"It {excess(key)}.") from None
    return key


def _key_of(value: str, *, strict: bool) -> str:
    if value.startswith('"'):
        found = _STRING.fullmatch(value)
        if found is None:
            raise _invalid(
                'It is no string of RFC 8941, such as "8e03978e-40d5": one string in double quotes.'
            )
        return re.sub(r"\\(.)", r"\1", found[1])
    if strict:
        raise _invalid('It is to be a string of RFC 8941, in double quotes: "8e03978e-40d5".')
    if "," in value:
        raise _invalid("It was sent more than once, or has a comma outside of double quotes.")
    if not _BARE.fullmatch(value):
        raise _invalid('Without double quotes it has no spaces and none of " , ; and \\.')
    return value


def _invalid(why: str) -> RequestRefused:
    return RequestRefused("idempotency_key_invalid", why)
