"""The stamp: how a message carries its key, scope and fingerprint, and what publishers may set in its headers.

::

    {"idempotency": {"id": "5c0…", "key": "order-17", "scope": "acct_1", "fingerprint": "9f86…"}}

The task id in the stamp says which message it describes: Celery copies the headers of a task to its retries and
callbacks, and tracing tools copy them to any task that is called within it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, TypeGuard

from celery_idempotent.errors import InvalidKey
from celery_idempotent.keys.arguments import MAPPINGS
from celery_idempotent.records import FINGERPRINT_BYTES, Identity

#: What a publisher of any language may set: the raw key (str, int, or a list of these) and scope.
KEY_HEADER, SCOPE_HEADER = "idempotency_key", "idempotency_scope"

#: A client asks for the outcome by the key, so a final failure is stored as FAILED instead of releasing the key.
KEEP_FAILURE_HEADER = "idempotency_keep_failure"

#: Its identity, computed once when it was first published, and its history since (how often it was republished).
STAMP_HEADER = "idempotency"

#: In a stamp of the last step of a chain, whose task id is the same each time that the chain is applied: that of the
#: first step.
RUN = "run"

#: In a stamp: what a publisher set in the headers above.
RAW_KEY, RAW_SCOPE, KEEP_FAILURE = "raw_key", "raw_scope", "keep_failure"
RAW = {KEY_HEADER: RAW_KEY, SCOPE_HEADER: RAW_SCOPE, KEEP_FAILURE_HEADER: KEEP_FAILURE}

#: The longest canonical key, scope or namespace, in characters.
MAX_CHARS: Final = 255

_FINGERPRINT_HEX = re.compile(f"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")


def as_mapping(headers: object) -> dict[str, object]:
    """Return a copy of headers, empty where they are no mapping: Celery does not check what callers pass."""
    return dict(headers) if headers is not None and isinstance(headers, MAPPINGS) else {}


def stamp_of(headers: Mapping[str, object], task_id: str | None) -> object:
    """Return the stamp of the message with this task id, or ``None``: one with another id was copied along."""
    found = headers.get(STAMP_HEADER)
    if found is not None and isinstance(found, MAPPINGS) and found.get("id") != task_id:
        return None
    return found


def read_stamp(headers: Mapping[str, object], task_id: str | None) -> dict[str, object]:
    """Return all that headers say about the message with this task id: its stamp, and what a publisher set beside it.

    A raw header that equals the one in another message's stamp was copied along with that stamp, and does not count.
    """
    own = as_mapping(stamp_of(headers, task_id))
    if RAW.keys().isdisjoint(headers):
        return own
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
    """Return the headers with a stamp for the message with this task id, which takes in the raw headers.

    Those are removed: they name no task id, so a copy of them on another message would count there.
    """
    said = read_stamp(headers, task_id) if headers else {}
    if identified is not None:
        for word in (RAW_KEY, RAW_SCOPE, *Identified.WORDS) if said else ():
            said.pop(word, None)
        said |= identified.to_header()
    stamped = {STAMP_HEADER: {**said, **(more or {}), "id": task_id}}
    return {**{name: each for name, each in headers.items() if name not in RAW}, **stamped}


def message_id(said: Mapping[str, object], task_id: str) -> str:
    """Return the message's own task id, with the run of the chain where it is the last step of one.

    ``said`` is what :func:`read_stamp` returned. Two deliveries of one message share it, two messages never do.
    """
    run = said.get(RUN)
    return f"{task_id}/{run}" if isinstance(run, str) else task_id


def is_text(value: object) -> TypeGuard[str]:
    """Can this be a canonical key, scope or namespace?"""
    return isinstance(value, str) and 0 < len(value) <= MAX_CHARS and value.isprintable()


@dataclass(slots=True)
class Identified:
    """The identity of one call and its fingerprint, which is None where it is off."""

    identity: Identity
    fingerprint: bytes | None = None

    #: The items of a stamp that these are written to.
    WORDS: ClassVar[frozenset[str]] = frozenset({"key", "scope", "fingerprint"})

    def to_header(self) -> dict[str, object]:
        """Return what goes into the message's stamp."""
        header: dict[str, object] = {"key": self.identity.key}
        if self.identity.scope:
            header["scope"] = self.identity.scope
        if self.fingerprint is not None:
            header["fingerprint"] = self.fingerprint.hex()
        return header

    @classmethod
    def from_header(cls, header: object, namespace: str) -> Identified | None:
        """Return what a message's stamp contains, or None if there is no stamp, or no key in it.

        Raises:
            InvalidKey: if it is malformed. It came over the network: anything may be in it.
        """
        if header is None:
            return None
        if not isinstance(header, MAPPINGS):
            raise InvalidKey(f"A message of {namespace} has a stamp that is not a mapping.")
        if "id" in header and cls.WORDS.isdisjoint(header):
            return None
        key, scope, digest = header.get("key"), header.get("scope", ""), header.get("fingerprint")
        if not is_text(key) or not (scope == "" or is_text(scope)):
            raise InvalidKey(f"A message of {namespace} has a stamp without a usable key or scope.")
        identity = Identity(namespace=namespace, scope=scope, key=key)
        if digest is None:
            return cls(identity)
        if isinstance(digest, str) and _FINGERPRINT_HEX.fullmatch(digest):
            return cls(identity, bytes.fromhex(digest))
        raise InvalidKey(f"A message of {namespace} has a stamp without a usable fingerprint.")
