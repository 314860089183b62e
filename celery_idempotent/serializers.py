"""Results and exceptions to bytes and back, through kombu's registry, as Celery's result backend does it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from json import JSONDecoder
from typing import Final

from kombu import serialization
from kombu.exceptions import DecodeError, EncodeError, SerializerNotInstalled
from kombu.utils import json

from celery_idempotent.errors import InvalidOption, ResultUnavailable, StoreMisconfigured
from celery_idempotent.records import State, Stored

logger = logging.getLogger(__name__)

JSON: Final = "application/json"
#: The stored response of a view: an HTTP message.
HTTP: Final = "application/http"

_dumps: Callable[..., tuple[str, str, str | bytes]] = serialization.dumps
_loads: Callable[..., object] = serialization.loads
_registry = vars(serialization)["registry"]  # public in kombu, unknown to celery-types
_types: dict[str, str] = _registry.name_to_type
_names: dict[str, str] = _registry.type_to_name

#: Write and read a value as kombu's ``dumps`` and ``loads`` do, which make a new encoder or decoder for each value.
encode_json: Callable[[object], str] = json.JSONEncoder().encode
decode_json: Callable[[str], object] = JSONDecoder(object_hook=json.object_hook).decode


class NotStored(ValueError):
    """A value cannot be serialized, or is too large; the message is without the value."""


class Serializer:
    """Writes one format of kombu's registry and reads those that the app accepts (``accept_content``).

    Raises:
        InvalidOption: if its format is not installed or not accepted: no duplicate could read a result.
    """

    def __init__(
        self, name: str = "json", accept: Iterable[str] = ("json",), *, what: str = "serializer"
    ) -> None:
        self.name = name
        self.accept = tuple(accept)
        if not installed(name):
            raise InvalidOption(
                f"{what} is {name!r}, which is not installed. Install its package, or choose another."
            )
        self._is_kombus_json = is_kombus_json()
        self._is_plain_json = name == "json" and self._is_kombus_json
        self._accepted = {_types.get(each, each) for each in self.accept}
        if _types[name] not in self._accepted:
            raise InvalidOption(
                f"{what} is {name!r}, which this app does not accept (it accepts "
                f"{', '.join(self.accept) or 'nothing'}): add it to result_accept_content or accept_content, or choose "
                "another."
            )

    def dump(self, value: object, *, max_bytes: int | None = None) -> Stored:
        """Serialize a value of at most ``max_bytes``.

        Raises:
            NotStored: if it is larger, or cannot be read back: msgpack writes dicts with keys of int, pickle writes
                exceptions whose class takes other arguments.
        """
        content_type, content_encoding = JSON, "utf-8"
        try:
            if self._is_plain_json:
                text: str | bytes = encode_json(value)
            else:
                content_type, content_encoding, text = _dumps(value, serializer=self.name)
            body = text.encode() if isinstance(text, str) else bytes(text)
            problem = ""
            if max_bytes is not None and len(body) > max_bytes:
                problem = f"takes {len(body):,} bytes as {self.name}, and {max_bytes:,} are allowed"
            # JSON reads all it writes but a dict that looks like kombu's envelope of a datetime.
            elif content_type != JSON or b'"__type__"' in body:
                _loads(body, content_type, content_encoding, accept=self._accepted)
        except Exception:  # noqa: BLE001  unpickling runs any code
            problem = f"cannot be written as {self.name} and read again"
        if problem:
            raise NotStored(f"a {type(value).__qualname__} {problem}")
        return Stored(content_type, content_encoding, body)

    def load(self, stored: Stored) -> object:
        """Return the value that was stored.

        Raises:
            StoreMisconfigured: if the app does not accept the format, or lacks its package.
            ResultUnavailable: if the body is damaged, or the code it needs has changed.
        """
        name = _names.get(stored.content_type)
        if name is None or stored.content_type not in self._accepted:
            raise StoreMisconfigured(
                f"A stored value is {name or stored.content_type!r}, which this app does not accept "
                f"(it accepts {', '.join(self.accept)}): add it to result_accept_content or "
                "accept_content, or forget the key."
            )
        kind = stored.content_type
        try:
            if kind == JSON and self._is_kombus_json:
                return decode_json(stored.body.decode())
            return _loads(stored.body, kind, stored.content_encoding, accept=self._accepted)
        except SerializerNotInstalled:
            problem = f"A stored value is {name!r}, whose package is not installed here."
            raise StoreMisconfigured(problem) from None
        except Exception as error:  # noqa: BLE001  what a hook of kombu's JSON raises
            wrapped = isinstance(error, DecodeError) and (error.__cause__ or error.__context__)
            cause = type(wrapped or error).__name__
        raise ResultUnavailable(f"A stored value of type {name} cannot be read ({cause}).")


def log_not_kept(owner: object, state: State, reason: object) -> None:
    """Log that a record is settled without its value or exception."""
    kind, then = "result", "will look for it in the result backend"
    if state is State.FAILED:
        kind, then = "exception", "get ResultUnavailable"
    line = "idempotency: the %s of %s is not kept in its record (%s): duplicates %s"
    logger.warning(line, kind, owner, reason, then)


def is_kombus_json() -> bool:
    """Are kombu's own encoder and decoder registered as ``json``? A project may register others."""
    encoders, decoders = _registry._encoders, _registry._decoders  # noqa: SLF001  the only way to know it
    return encoders["json"].encoder is json.dumps and decoders[JSON] is json.loads


def to_bytes(stored: Stored) -> bytes:
    """Return a value and its format in one piece, for a message to be stored."""
    return f"{stored.content_type}\n{stored.content_encoding}\n".encode() + stored.body


def from_bytes(content: bytes) -> Stored:
    """Return the value that :func:`to_bytes` packed."""
    content_type, content_encoding, body = content.split(b"\n", 2)
    return Stored(content_type.decode(), content_encoding.decode(), body)


def first_accepted(first: str, accept: Iterable[str]) -> str:
    """Return ``first``, which an app may write for others alone, or the first installed format that it accepts."""
    names = [_names.get(each, each) for each in (first, *accept)]
    readable = (n for n in names if {n, _types.get(n)} & set(accept) and installed(n))
    return next(readable, names[0])


def installed(name: str) -> bool:
    """Is there a package to write this format, by kombu's name?"""
    try:
        _dumps(None, serializer=name)
    except SerializerNotInstalled:
        return False
    except EncodeError:
        pass
    return True
