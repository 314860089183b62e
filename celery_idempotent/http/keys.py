"""The key of a request: its ``Idempotency-Key`` header, a string of RFC 9651 or a bare value, and its identity."""

from __future__ import annotations

import logging
import re
from typing import Final

from celery_idempotent.errors import InvalidKey
from celery_idempotent.http.answers import RequestRefused
from celery_idempotent.keys.rules import canonical
from celery_idempotent.keys.stamp import MAX_CHARS
from celery_idempotent.records import Identity

logger = logging.getLogger(__name__)

#: Nothing longer is looked at: a key of 255 characters, each of them escaped, its quotes, and some parameters.
MAX_HEADER_CHARS: Final = 1024

_NAME = r"[a-z*][a-z0-9_.*-]*"
_QUOTED = r'"(?:[ !#-\[\]-~]|\\["\\])*"'
#: What a parameter may be.
_ITEM = "|".join(
    (
        r"-?[0-9]{1,15}(?:\.[0-9]{1,3})?",  # a number
        _QUOTED,
        r"[A-Za-z*][!#$%&'*+.^_`|~0-9A-Za-z:/-]*",  # a token
        r":[A-Za-z0-9+/=]*:",  # bytes
        r"\?[01]",  # a boolean
        r"@-?[0-9]{1,15}",  # a date
        r'%"(?:[ !#$&-~]|%[0-9a-f]{2})*"',  # a display string
    )
)
#: Parameters mean nothing here, and RFC 9651 wants them ignored.
_STRING: Final = re.compile(rf"({_QUOTED})(?:; *{_NAME}(?:=(?:{_ITEM}))?)*", re.ASCII)
#: Visible ASCII but what begins, separates or escapes something in a structured field: servers join a header that was
#: sent twice with a comma.
_BARE: Final = re.compile(r"[!#-+\--:<-\[\]-~]*")


def read_key(raw: object, *, required: bool = False) -> str | None:
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
            "Send a header Idempotency-Key with a value that is new for each intention, such as a UUID, and the same "
            "when you try again.",
        )
    if not isinstance(raw, str) or len(raw) > MAX_HEADER_CHARS:
        raise _invalid(f"It has more than {MAX_HEADER_CHARS} characters.")
    key = raw.strip(" ")
    if not (key.isascii() and key.isprintable()):
        raise _invalid("It has characters other than printable ASCII.")
    if key.startswith('"'):
        found = _STRING.fullmatch(key)
        if found is None:
            raise _invalid(
                'It is no string of RFC 9651, such as "8e03978e-40d5": one string in double quotes.'
            )
        key = re.sub(r"\\(.)", r"\1", found[1][1:-1])
    elif "," in key:
        raise _invalid("It was sent more than once, or has a comma outside of double quotes.")
    elif not _BARE.fullmatch(key):
        raise _invalid('Without double quotes it has no spaces and none of " , ; and \\.')
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


def http_identity(namespace: str, scope: object, key: str) -> Identity:
    """Return the identity of a key of a caller.

    Raises:
        InvalidKey: if the key cannot be one, which :func:`read_key` refuses.
        RequestRefused: ``caller_unknown``, if the scope cannot be one: it often comes from the request as well.
    """
    text = canonical(key, task=namespace)
    try:
        whose = canonical(scope, what="scope", task=namespace)
    except InvalidKey as error:
        logger.warning("idempotency: a caller is refused: %s", error)
        raise RequestRefused(
            "caller_unknown", "What the request says of its sender is no name."
        ) from None
    return Identity(namespace=namespace, scope=whose, key=text)
