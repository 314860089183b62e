"""How a value is packed: its types in one byte where kombu's own names serve, then its body.

::

    1 byte   number of a known pair of content type and encoding, 0 for any other
    [0:      content type and encoding, each after its length in 2 bytes]
    the body, to the end
"""

from __future__ import annotations

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import State, Stored

#: The letter that stands for each state. Letters are stored: add, never change.
LETTERS = {
    State.QUEUED: "Q",
    State.PROCESSING: "P",
    State.INTERRUPTED: "I",
    State.COMPLETED: "C",
    State.FAILED: "F",
}
STATES = {letter: state for state, letter in LETTERS.items()}

#: What kombu's serializers write. Numbers are stored: add, never change.
_CONTENT = {
    1: ("application/json", "utf-8"),
    2: ("application/x-python-serialize", "binary"),
    3: ("application/x-msgpack", "binary"),
    4: ("application/x-yaml", "utf-8"),
    5: ("application/data", "binary"),
    6: ("text/plain", "utf-8"),
    7: ("application/data", "utf-8"),
}
_CONTENT_CODES = {pair: code for code, pair in _CONTENT.items()}

_OTHER = 0


def pack_value(value: Stored) -> bytes:
    """Return the value as it stands at the end of a record or a step."""
    code = _CONTENT_CODES.get((value.content_type, value.content_encoding), _OTHER)
    names = b""
    if code == _OTHER:
        names = pack_text(value.content_type) + pack_text(value.content_encoding)
    return bytes((code,)) + names + value.body


def unpack_value(packed: bytes, at: int) -> Stored:
    """Return the value from ``at`` to the end.

    Raises:
        StoreMisconfigured: if it is damaged, or in a form that this version does not know.
    """
    try:
        return _unpack_value(packed, at)
    except (IndexError, UnicodeDecodeError) as error:
        raise StoreMisconfigured("a stored value is damaged") from error


def _unpack_value(packed: bytes, at: int) -> Stored:
    """Read a value from this place to the end: see the drawing at the beginning of this module."""
    code = packed[at]
    at += 1
    if code == _OTHER:
        content_type, at = unpack_text(packed, at)
        content_encoding, at = unpack_text(packed, at)
    elif code in _CONTENT:
        content_type, content_encoding = _CONTENT[code]
    else:
        raise StoreMisconfigured(
            f"a value of content code {code} was written by a newer version of celery-idempotent: upgrade this one"
        )
    return Stored(content_type=content_type, content_encoding=content_encoding, body=packed[at:])


def pack_text(text: str) -> bytes:
    """Return the text after its length."""
    data = text.encode()
    return len(data).to_bytes(2, "big") + data


def unpack_text(packed: bytes, at: int) -> tuple[str, int]:
    """Return the text at ``at``, and where it ends."""
    end = at + 2 + int.from_bytes(packed[at : at + 2], "big")
    return packed[at + 2 : end].decode(), end
