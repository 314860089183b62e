"""The fields of a record in every store: one line of JSON of what is not as usual, and the bytes that it tells of.

A new field of a record is in the line unless it has its default, and needs nothing here. An older version that writes
the record anew leaves it out: a field that must not be lost needs a version of its store's format.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import lru_cache
from typing import Any

from celery_idempotent.records import Record, State, Stored

#: The letter that stands for each state. Letters are stored: add, never change.
LETTERS = {
    State.QUEUED: "Q",
    State.PROCESSING: "P",
    State.INTERRUPTED: "I",
    State.COMPLETED: "C",
    State.FAILED: "F",
}
STATES = {letter: state for state, letter in LETTERS.items()}

#: What a line may have, a store's own among them.
_NAMES = {each.name for each in fields(Record)} | {"requeues", "attempt"}
#: A task id may be any text.
_UTF_8 = ("utf-8", "surrogatepass")
#: The kind of almost every value, which is left out.
_USUAL_KIND = ["application/json", "utf-8"]
_from_json = json.JSONDecoder().decode


class FieldCodec:
    """Writes and reads the fields that a store does not keep ``elsewhere``.

    ``ascii_only``: in letters of ASCII alone, for a database's character set may be small. A letter then takes up to 12
    bytes, else 4.
    """

    def __init__(self, *elsewhere: str, ascii_only: bool = False) -> None:
        self._to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=ascii_only).encode
        left_out = {*elsewhere, "message", "steps", "value"}
        #: The fields of the line by what they are if they are left out.
        self.defaults: dict[str, Any] = {
            each.name: each.default
            for each in fields(Record)
            if each.default is not MISSING and each.name not in left_out
        } | {"requeues": 0}
        self._values = tuple(self.defaults.values())
        self._usual = lru_cache(maxsize=64)(self._line)

    def encode(self, fields: Mapping[str, Any], others: dict[str, Any]) -> tuple[bytes, bytes]:
        """Return the line, with ``others`` of the store's own, and the bytes of message and steps."""
        data = b""
        message: bytes | None = fields.get("message")
        if message is not None:
            others["message"], data = len(message), message
        if steps := fields.get("steps"):
            others["steps"] = [
                [name, each.content_type, each.content_encoding, len(each.body)]
                for name, each in steps
            ]
            data += b"".join([each.body for _, each in steps])
        value: Stored | None = fields.get("value")
        if value is not None:
            content_type, encoding = value.content_type, value.content_encoding
            if content_type != "application/json" or encoding != "utf-8":
                others["value"] = [content_type, encoding]
        # The same for most runs of a process.
        line = self._usual(tuple(map(fields.get, self.defaults, self._values)))
        if others:
            line = (line[:-1] + b"," if line else b"{") + self._to_json(others)[1:].encode(*_UTF_8)
        return line, data

    def _line(self, values: tuple[Any, ...]) -> bytes:
        unusual = {
            name: value
            for (name, default), value in zip(self.defaults.items(), values, strict=True)
            if value != default
        }
        return self._to_json(unusual).encode(*_UTF_8) if unusual else b""

    def decode(
        self, line: bytes, data: bytes, at: int, has_value: object, summary: bool = False
    ) -> dict[str, Any]:
        """Return the fields in a line, and those whose bytes are in the data from ``at`` on, the value last.

        Those of a newer version are left out.

        Raises:
            ValueError, KeyError, TypeError: if it is damaged.
        """
        found: dict[str, Any] = {}
        kind = _USUAL_KIND
        message: int | None = None
        steps: list[list[Any]] = []
        if line:
            found = _from_json(line.decode(*_UTF_8))
            kind = found.pop("value", _USUAL_KIND)
            message, steps = found.pop("message", None), found.pop("steps", [])
            found = {name: value for name, value in found.items() if name in _NAMES}
        if summary:
            return found
        if message is not None:
            found["message"], at = data[at : at + message], at + message
        if steps:
            read = []
            for name, content_type, encoding, size in steps:
                body, at = data[at : at + size], at + size
                read.append(
                    (name, Stored(content_type=content_type, content_encoding=encoding, body=body))
                )
            found["steps"] = tuple(read)
        if has_value:
            found["value"] = Stored(content_type=kind[0], content_encoding=kind[1], body=data[at:])
        elif at != len(data):
            raise ValueError(at)
        return found
