"""What a record is called in an address and in the log of the admin: namespace, scope and key as one text."""

from __future__ import annotations

import json

from celery_idempotent.keys.stamp import MAX_CHARS
from celery_idempotent.records import Identity

#: Three texts of so many characters, each escaped with up to 12, and what is around them.
_LONGEST = 3 * 12 * MAX_CHARS + 16


def unparse(identity: Identity) -> str:
    """Return the identity as one text."""
    parts = [identity.namespace, identity.scope, identity.key]
    return json.dumps(parts, ensure_ascii=False, separators=(",", ":"))


def parse(name: str) -> Identity:
    """Return the identity that :func:`unparse` wrote down.

    Raises:
        ValueError: if it wrote no such thing.
    """
    if len(name) > _LONGEST:
        raise ValueError("too long")
    try:
        parts = json.loads(name)
    except RecursionError:
        raise ValueError("too deep") from None
    if not isinstance(parts, list) or len(parts) != 3:
        raise ValueError("not three parts")
    for part in parts:
        if not isinstance(part, str) or len(part) > MAX_CHARS or "\0" in part:
            raise ValueError("not a text that fits")
        part.encode()  # no lone surrogates: a ValueError, too
    namespace, scope, key = parts
    if not namespace or not key:
        raise ValueError("a part is missing")
    return Identity(namespace=namespace, scope=scope, key=key)
