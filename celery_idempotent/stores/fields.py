"""The codec of a record's fields for every store: one line of JSON with those that are not as usual.

A field that an older version must not drop when it rewrites the record needs a new version of its store's format.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import lru_cache
from operator import attrgetter
from typing import Any

from celery_idempotent.errors import StoreMisconfigured
from celery_idempotent.records import Identity, Record, State, Stored

#: The letter that is stored for each state, for ever; databases have a letter more, django/sql/rows.py.
LETTERS = {state: state.name[0] for state in State}
STATES = {letter: state for state, letter in LETTERS.items()}

#: Where a stored record has its fields.
STORED = {each.name: f"record.{each.name}" for each in fields(Record)} | {"requeues": "requeues"}
_NAMES = {*STORED, "attempt"}
#: A task id may be any text.
_UTF_8 = ("utf-8", "surrogatepass")
#: The content type and encoding of almost every value, which are left out.
_USUAL_KIND = ("application/json", "utf-8")
Steps = Sequence[tuple[str, Stored]]
_from_json = json.JSONDecoder().decode


class Unreadable(StoreMisconfigured):
    """A record is damaged, or another version wrote it."""

    identity: Identity

    @classmethod
    def at(cls, identity: Identity, place: str) -> Unreadable:
        """Return the error, which says where the record is."""
        error = cls(
            f"the record of {identity} ({place}) cannot be read: it is damaged, or an older or a newer version of"
            " celery-idempotent wrote it. Upgrade this one; if it is the newest, `forget --force` deletes the record"
        )
        error.identity = identity
        return error


class FieldCodec:
    """Writes and reads the fields that a store does not keep ``elsewhere``.

    ``ascii_only``: for databases with a small character set; a character then takes up to 12 bytes.
    """

    def __init__(self, *elsewhere: str, ascii_only: bool = False) -> None:
        self._to_json = json.JSONEncoder(separators=(",", ":"), ensure_ascii=ascii_only).encode
        left_out = {*elsewhere, "message", "steps", "value"}
        self.defaults: dict[str, Any] = {
            each.name: each.default
            for each in fields(Record)
            if each.default is not MISSING and each.name not in left_out
        } | {"requeues": 0}

    def writer(self, paths: Mapping[str, str]) -> Callable[..., bytes]:
        """Return what writes the line of a record, or of the request for one, whose fields are where the paths lead.

        Most runs of a process have the same line. Keeping it saves a fifth of a claim's instructions.
        """
        names = [name for name in paths if name in self.defaults]
        read = attrgetter(*(paths[name] for name in names))

        @lru_cache(maxsize=64)
        def usual(kind: tuple[str, str] | None, values: Sequence[object]) -> bytes:
            found = zip(names, values, strict=True)
            unusual = {name: each for name, each in found if each != self.defaults[name]}
            if kind not in (None, _USUAL_KIND):
                unusual["value"] = kind
            return self._to_json(unusual).encode(*_UTF_8) if unusual else b""

        def line(
            subject: object,
            value: Stored | None,
            message: bytes | None,
            steps: Steps,
            others: dict[str, Any],
        ) -> bytes:
            kind = None if value is None else (value.content_type, value.content_encoding)
            line = usual(kind, read(subject))
            if message is not None or steps:  # what may be long comes last
                kept = [[n, s.content_type, s.content_encoding, _text(s.body)] for n, s in steps]
                others["long"] = [None if message is None else _text(message), kept]
            if others:
                line = (line[:-1] + b"," if line else b"{") + self._to_json(others)[1:].encode(
                    *_UTF_8
                )
            return line

        return line

    def decode(self, line: bytes, value: bytes | None) -> dict[str, Any]:
        """Return the fields in a line, without those of a newer version, and the value."""
        if not line:  # almost every settled record of a task has none
            return {} if value is None else {"value": Stored(*_USUAL_KIND, value)}
        kind, found = (_read_again if len(line) < 256 else _read)(line)
        return found.copy() if value is None else {**found, "value": Stored(*kind, value)}


def _read(line: bytes) -> tuple[tuple[str, str], dict[str, Any]]:
    """Return the kind of the value, and the other fields."""
    found = _from_json(line.decode(*_UTF_8))
    kind, (message, steps) = found.pop("value", _USUAL_KIND), found.pop("long", (None, ()))
    found = {name: each for name, each in found.items() if name in _NAMES}
    if "copies" in found:
        found["copies"] = tuple(found["copies"])
    if message is not None:
        found["message"] = b64decode(message)
    if steps:
        found["steps"] = tuple(
            (name, Stored(form, code, b64decode(body))) for name, form, code, body in steps
        )
    return kind, found


#: The stored responses of a view have the same line: 7 % of a repetition's instructions.
_read_again = lru_cache(maxsize=64)(_read)


def _text(body: bytes) -> str:
    return b64encode(body).decode()


def without_long(start: bytes) -> bytes:
    """Return a line without message and steps; ``start`` is its beginning, and may end anywhere in them."""
    # No text in a line contains the mark: its quotes would be escaped.
    line, mark, _ = start.partition(b'"long":')
    return line.rstrip(b",") + b"}" if mark else line
