"""The stamp: how a message carries its key, scope and fingerprint; and the headers that a publisher may set.

::

    {"idempotency": {"id": "5c0…", "key": "order-17", "scope": "acct_1", "fingerprint": "9f86…"}}

The task id tells the stamp of this message from a copy: Celery copies headers to retries and callbacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from celery_idempotent.errors import InvalidKey
from celery_idempotent.keys.arguments import MAPPINGS
from celery_idempotent.records import FINGERPRINT_BYTES, Identity

#: Headers that a publisher of any language may set: the raw key (str, int, or a list of these) and scope.
KEY_HEADER, SCOPE_HEADER = CALL_OPTIONS = "idempotency_key", "idempotency_scope"

#: Asks that a final failure is stored as FAILED: a client will ask for the outcome by the key.
KEEP_FAILURE_HEADER = "idempotency_keep_failure"

STAMP_HEADER = "idempotency"

#: In the stamp of a chain's last step, whose task id is the same each time: the task id of the first step.
RUN = "run"

#: In a stamp: the values of the headers above.
RAW_KEY, RAW_SCOPE, KEEP_FAILURE = "raw_key", "raw_scope", "keep_failure"
RAW = {KEY_HEADER: RAW_KEY, SCOPE_HEADER: RAW_SCOPE, KEEP_FAILURE_HEADER: KEEP_FAILURE}

#: The longest canonical key, scope or namespace, in characters.
MAX_CHARS: Final = 255

_IDENTITY = frozenset({"key", "scope", "fingerprint"})
_DIGITS, _HEX = 2 * FINGERPRINT_BYTES, "0123456789abcdef"


def as_mapping(headers: object) -> dict[str, object]:
    """Return a copy of headers, empty if they are no mapping: Celery accepts anything there."""
    return dict(headers) if headers is not None and isinstance(headers, MAPPINGS) else {}


def stamp_of(headers: Mapping[str, object], task_id: str | None) -> object:
    """Return the stamp of the message with this task id, ``None`` without one: another id shows a copy."""
    found = headers.get(STAMP_HEADER)
    if found is not None and isinstance(found, MAPPINGS) and found.get("id") != task_id:
        return None
    return found


def read_stamp(headers: Mapping[str, object], task_id: str | None) -> dict[str, object]:
    """Return the stamp of the message with this task id, and the raw headers that a publisher set beside it."""
    own = as_mapping(stamp_of(headers, task_id))
    if RAW.keys().isdisjoint(headers):
        return own
    # A raw header that equals the one in another message's stamp was copied with that stamp.
    others = {} if own else as_mapping(headers.get(STAMP_HEADER))
    raw = {
        word: headers[name]
        for name, word in RAW.items()
        if headers.get(name) is not None and others.get(word) != headers[name]
    }
    return {**raw, **own}


def with_stamp(
    headers: Mapping[str, object],
    task_id: str,
    identified: Identified | None = None,
    more: Mapping[str, object] | None = None,
) -> dict[str, object]:
    """Return the headers with a stamp for the message with this task id, and without raw headers.

    They name no task id: a copy of them on another message would be valid there.
    """
    info: dict[str, object] = {}
    if headers:
        info = read_stamp(headers, task_id)
        headers = {name: each for name, each in headers.items() if name not in RAW}
    if identified is not None:
        for word in (RAW_KEY, RAW_SCOPE, *_IDENTITY) if info else ():
            info.pop(word, None)
        info |= identified.to_header()
    return {**headers, STAMP_HEADER: {**info, **(more or {}), "id": task_id}}


def message_id(info: Mapping[str, object], task_id: str) -> str:
    """Return an id that no other message has, from what :func:`read_stamp` returned and the task id."""
    run = info.get(RUN)
    return f"{task_id}/{run}" if isinstance(run, str) else task_id


def is_text(value: object) -> TypeGuard[str]:
    """Can this be a canonical key, scope or namespace?"""
    return isinstance(value, str) and 0 < len(value) <= MAX_CHARS and value.isprintable()


@dataclass(slots=True)
class Identified:
    """The identity of one call, and its fingerprint unless that is off."""

    identity: Identity
    fingerprint: bytes | None = None

    def to_header(self) -> dict[str, object]:
        """Return the items of the stamp."""
        header: dict[str, object] = {"key": self.identity.key}
        if self.identity.scope:
            header["scope"] = self.identity.scope
        if self.fingerprint is not None:
            header["fingerprint"] = self.fingerprint.hex()
        return header

    @classmethod
    def from_header(cls, header: object, namespace: str) -> Identified | None:
        """Return the identity in a stamp, ``None`` if it has none; raise ``InvalidKey`` for a malformed stamp."""
        if header is None:
            return None
        found: Mapping[str, Any] = header if isinstance(header, MAPPINGS) else {}
        key: Any = found.get("key")
        if key is None and "id" in found and _IDENTITY.isdisjoint(found):
            return None
        scope, digest = found.get("scope", ""), found.get("fingerprint")
        is_hex = isinstance(digest, str) and len(digest) == _DIGITS and not digest.strip(_HEX)
        is_key = isinstance(key, str) and 0 < len(key) <= MAX_CHARS and key.isprintable()
        if not (is_key and (scope == "" or is_text(scope)) and (digest is None or is_hex)):
            raise InvalidKey(f"A message of {namespace} has a malformed stamp.")
        identity = Identity(namespace=namespace, scope=scope, key=key)
        return cls(identity, None if digest is None else bytes.fromhex(digest))
