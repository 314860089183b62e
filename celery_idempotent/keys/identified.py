"""The identity and fingerprint of one call, and their form in a message's stamp."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Final, TypeGuard

from celery_idempotent.errors import InvalidKey
from celery_idempotent.records import FINGERPRINT_BYTES, Identity

#: The longest canonical key, scope or namespace, in characters.
MAX_CHARS: Final = 255

#: For ``isinstance``: a dict, as almost every mapping is, or any other. To ask an abstract class first would take a
#: hundred times as long.
MAPPINGS: Final = (dict, Mapping)

_FINGERPRINT_HEX = re.compile(f"[0-9a-f]{{{2 * FINGERPRINT_BYTES}}}")


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
        key, scope = header.get("key"), header.get("scope", "")
        if not is_text(key) or not (scope == "" or is_text(scope)):
            raise InvalidKey(f"A message of {namespace} has a stamp without a usable key or scope.")
        identity = Identity(namespace=namespace, scope=scope, key=key)
        fingerprint = header.get("fingerprint")
        if fingerprint is None:
            return cls(identity)
        if isinstance(fingerprint, str) and _FINGERPRINT_HEX.fullmatch(fingerprint):
            return cls(identity, bytes.fromhex(fingerprint))
        raise InvalidKey(f"A message of {namespace} has a stamp without a usable fingerprint.")


def is_text(value: object) -> TypeGuard[str]:
    """Can this be a canonical key, scope or namespace?"""
    return isinstance(value, str) and 0 < len(value) <= MAX_CHARS and value.isprintable()
