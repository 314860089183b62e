"""The stamp: how a message carries its key, scope and fingerprint, and what publishers may set in its headers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from celery_idempotent.identity.identified import Identified

__all__ = [
    "KEEP_FAILURE",
    "KEEP_FAILURE_HEADER",
    "KEY_HEADER",
    "RAW",
    "RAW_KEY",
    "RAW_SCOPE",
    "RUN",
    "SCOPE_HEADER",
    "STAMP_HEADER",
    "as_mapping",
    "bound",
    "own_id",
    "said_of",
    "stamp_of",
]

#: What a publisher of any language may set: the raw key (str, int, or a list of these) and scope.
KEY_HEADER = "idempotency_key"
SCOPE_HEADER = "idempotency_scope"

#: Somebody asks for the outcome by the key, and is to learn of a final failure: it is kept as FAILED. Retries of the
#: message carry it along.
KEEP_FAILURE_HEADER = "idempotency_keep_failure"

#: All that this library says about a message, under the task id of that message: its canonical key, scope and
#: fingerprint, computed once when it was first published, and what it went through since.
STAMP_HEADER = "idempotency"

#: In a stamp: which application of a chain its last step belongs to, the task id of that application's head.
RUN = "run"

#: In a stamp: what a publisher said in headers of its own.
RAW_KEY, RAW_SCOPE, KEEP_FAILURE = "raw_key", "raw_scope", "keep_failure"
#: Which header says which of them.
RAW = {KEY_HEADER: RAW_KEY, SCOPE_HEADER: RAW_SCOPE, KEEP_FAILURE_HEADER: KEEP_FAILURE}


def stamp_of(headers: Mapping[str, object], task_id: str | None) -> object:
    """Return the stamp of the message with this task id, or ``None``.

    A task that hands its own headers on to another call (tracing does) hands on a stamp that is not the other's.
    """
    found = headers.get(STAMP_HEADER)
    if isinstance(found, Mapping) and found.get("id") != task_id:
        return None
    return found


def said_of(headers: Mapping[str, object], task_id: str | None) -> dict[str, object]:
    """Return all that headers say about the message with this task id: its stamp, and what a publisher set beside it.

    What is repeated from the stamp of another message was handed on with it, and says nothing about this one.
    """
    own = as_mapping(stamp_of(headers, task_id))
    others = {} if own else as_mapping(headers.get(STAMP_HEADER))
    raw = {
        word: headers[name]
        for name, word in RAW.items()
        if headers.get(name) is not None and others.get(word) != headers[name]
    }
    return {**raw, **own}


def bound(
    headers: Mapping[str, object],
    task_id: str,
    identified: Identified | None = None,
    more: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return headers that say nothing about any other message, wherever they are copied to.

    All that they say about the message with this task id is in its stamp, and so is what it is about, and ``more``.
    """
    said = said_of(headers, task_id)
    if identified is not None:
        for word in (RAW_KEY, RAW_SCOPE, *Identified.WORDS):
            said.pop(word, None)
        said |= identified.to_header()
    rest = {name: value for name, value in headers.items() if name not in RAW}
    return {**rest, STAMP_HEADER: {**said, **(more or {}), "id": task_id}}


def own_id(headers: Mapping[str, object], task_id: str) -> str:
    """Return what tells this message from all that are not redeliveries of it: its task id, and its run of a chain."""
    run = said_of(headers, task_id).get(RUN)
    return f"{task_id}/{run}" if isinstance(run, str) else task_id


def as_mapping(headers: object) -> dict[str, Any]:
    """Return a copy of headers, or none where they are no mapping: Celery passes on whatever it is given."""
    return dict(headers) if isinstance(headers, Mapping) else {}
