"""Results and exceptions to bytes and back, through kombu's registry of serializers.

What comes back is what Celery's own result backend would give with the same serializer. JSON keeps
str, int (of any size), float, bool, None, list, bytes, datetime, date, time, Decimal and UUID
exactly; it turns tuples into lists and the keys of dicts into str. Pickle keeps all it can carry.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from kombu import serialization
from kombu.exceptions import ContentDisallowed, DecodeError, EncodeError, SerializerNotInstalled
from kombu.utils import json

from celery_idempotent.errors import InvalidOption, ResultUnavailable, StoreMisconfigured
from celery_idempotent.records import Stored

#: The content type of kombu's JSON.
JSON: Final = "application/json"

#: A value that an operator gives has at most so many bytes.
LARGEST: Final = 16 * 1024 * 1024

_dumps: Callable[..., tuple[str, str, str | bytes]] = serialization.dumps
_loads: Callable[..., object] = serialization.loads
_registry = vars(serialization)["registry"]  # public in kombu, unknown to celery-types
#: By the name of each format of kombu's registry, installed or not.
content_types: dict[str, str] = _registry.name_to_type
_names: dict[str, str] = _registry.type_to_name

#: Writes a value as kombu's ``dumps`` does, which makes a new encoder for each value: that takes longer than to write
#: most of them.
encode_json: Callable[[object], str] = json.JSONEncoder().encode


@dataclass(slots=True, kw_only=True)
class NotStored:
    """A value that was not serialized, and the word that says why; never the value itself.

    ``size`` is the length in bytes of a body that is too large.
    """

    reason: Literal["unserializable", "too-large"]
    type_name: str
    size: int | None = None


@dataclass(frozen=True, slots=True)
class Serializer:
    """Writes in one format and reads those that the app accepts.

    ``name`` is a name of kombu's registry, such as ``"json"``. ``accept`` holds names or content
    types, as Celery's ``accept_content`` does.

    Raises:
        InvalidOption: if a format is not installed, or ``name`` is not one of those accepted: what
            it wrote could never be read.
    """

    name: str = "json"
    accept: Iterable[str] = ("json",)
    _accepted: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Refuse what would be written and not read, now: a worker does not start with it.

        The other way round it would show only when the first duplicate asks for a result, in a task that has taken
        effect.
        """
        accept = tuple(self.accept)
        if not installed(self.name):
            raise InvalidOption(
                f"idempotency_serializer {self.name!r} is not installed; {_choices()}."
            )
        if unknown := [name for name in accept if "/" not in name and name not in content_types]:
            raise InvalidOption(
                f"accept_content names {', '.join(map(repr, unknown))}, which kombu does not know; "
                f"{_choices()}."
            )
        accepted = frozenset([content_types.get(name, name) for name in accept])
        if content_types[self.name] not in accepted:
            raise InvalidOption(
                f"idempotency_serializer {self.name!r} writes what this app does not accept (it "
                f"accepts {', '.join(accept) or 'nothing'}): add it to result_accept_content or "
                "accept_content, or choose another."
            )
        object.__setattr__(self, "accept", accept)
        object.__setattr__(self, "_accepted", accepted)

    def dump(self, value: object, *, max_bytes: int | None) -> Stored | NotStored:
        """Serialize a value, of at most ``max_bytes`` (None: of any size), if it can be read back.

        Never raises for the value's sake: the work is done, with or without a stored result.
        """
        content_type, content_encoding = JSON, "utf-8"
        try:
            if self.name == "json" and is_kombus_json():
                text: str | bytes = encode_json(value)
            else:
                content_type, content_encoding, text = _dumps(value, serializer=self.name)
            body = text.encode() if isinstance(text, str) else bytes(text)
        except Exception:  # noqa: BLE001  kombu makes an EncodeError of any
            return _not_stored("unserializable", value)
        if max_bytes is not None and len(body) > max_bytes:
            return _not_stored("too-large", value, len(body))
        # JSON reads all it writes but a dict that looks like kombu's envelope of a datetime and its like.
        is_plain = content_type == JSON and b'"__type__"' not in body
        if not is_plain and not self._reads_back(content_type, content_encoding, body):
            return _not_stored("unserializable", value)
        return Stored(content_type=content_type, content_encoding=content_encoding, body=body)

    def _reads_back(self, content_type: str, content_encoding: str, body: bytes) -> bool:
        """Whether a body can be loaded: most formats write things that they cannot read.

        msgpack writes dicts with keys of int, YAML such with keys of tuple, pickle objects whose
        class asks for other arguments.
        """
        try:
            _loads(body, content_type, content_encoding, accept=self._accepted)
        except Exception:  # noqa: BLE001  unpickling runs code of any kind
            return False
        return True

    def load(self, stored: Stored) -> object:
        """Return the value that was stored.

        Raises:
            StoreMisconfigured: if the app does not accept the format, or lacks its package.
            ResultUnavailable: if the body is damaged, or the code it needs has changed.
        """
        content_type = stored.content_type
        name = _names.get(content_type)
        if name is None or content_type not in self._accepted:
            raise StoreMisconfigured(
                f"A stored result is {name or content_type!r}, which this app does not accept "
                f"(it accepts {', '.join(self.accept)}): add it to result_accept_content or "
                "accept_content, or forget the key."
            )
        try:
            return decode(stored, self._accepted)
        except (ContentDisallowed, SerializerNotInstalled):
            problem = f"A stored result is {name!r}, whose package is not installed here."
            raise StoreMisconfigured(problem) from None
        except DecodeError as error:
            cause = type(error.__cause__ or error.__context__ or error).__name__
        raise ResultUnavailable(f"A stored result of type {name} cannot be read ({cause}).")


def decode(stored: Stored, accept: Collection[str] | None) -> object:
    """Return the value in a stored body: the one way from bytes to values.

    ``accept`` holds content types.

    Raises:
        ContentDisallowed: if its format is not accepted.
        DecodeError: if the body is damaged, or the code it needs has changed.
        SerializerNotInstalled: if the package of its format is missing.
    """
    return _loads(stored.body, stored.content_type, stored.content_encoding, accept=accept)


def is_kombus_json() -> bool:
    """Is kombu's own encoder registered as ``json``? A project may register another."""
    encoders: Any = _registry._encoders  # noqa: SLF001  the only way to know it
    return encoders["json"].encoder is json.dumps


def to_bytes(stored: Stored) -> bytes:
    """Return a value and its format in one piece, as messages are stored."""
    return f"{stored.content_type}\n{stored.content_encoding}\n".encode() + stored.body


def from_bytes(content: bytes) -> Stored:
    """Return what :func:`to_bytes` put together."""
    content_type, content_encoding, body = content.split(b"\n", 2)
    return Stored(
        content_type=content_type.decode(), content_encoding=content_encoding.decode(), body=body
    )


def _not_stored(
    reason: Literal["unserializable", "too-large"], value: object, size: int | None = None
) -> NotStored:
    return NotStored(reason=reason, type_name=type(value).__qualname__, size=size)


def first_accepted(candidates: Iterable[str], accept: Iterable[str]) -> str:
    """Return the first format, by name or content type, that is installed and that the app reads itself.

    An app may store its results as msgpack for others, and not accept msgpack. The format of a record is
    not configured then: it is the first that the app can read. If there is none, it is the
    first candidate, and :class:`Serializer` says what is wrong with it.
    """
    accepted = {content_types.get(name, name) for name in accept}
    first = ""
    for candidate in candidates:
        name = _names.get(candidate, candidate)
        first = first or name
        if content_types.get(name) in accepted and installed(name):
            return name
    return first


def installed(name: str) -> bool:
    """Can a format, by the name that kombu has for it, be written here?"""
    if name not in content_types:
        return False
    try:
        _dumps(None, serializer=name)
    except SerializerNotInstalled:
        return False
    except EncodeError:
        return True
    return True


def _choices() -> str:
    return f"installed are {', '.join(sorted(filter(installed, content_types)))}"
