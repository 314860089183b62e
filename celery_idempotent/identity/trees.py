"""The one walk over the signatures of a canvas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery_idempotent.identity.stamp import STAMP_HEADER, as_mapping, stamp_of

__all__ = ["leaves", "unstamp"]


def leaves(signature: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the signatures of single tasks in a canvas."""
    if not isinstance(signature, Mapping):
        return
    kwargs = signature.get("kwargs") or {}
    if str(signature.get("task")) not in {"celery.chain", "celery.group", "celery.chord"}:
        yield signature
        return
    for part in ("tasks", "header", "body"):
        inner = kwargs.get(part)
        for each in inner if isinstance(inner, (list, tuple)) else [inner]:
            yield from leaves(each)


def unstamp(signature: Any, task_id: str | None) -> None:
    """Take out of a canvas what was handed on of the message with this task id, which its replacement takes over."""
    for leaf in leaves(signature):
        options = leaf.get("options") or {}
        headers = as_mapping(options.get("headers"))
        if isinstance(leaf, dict) and stamp_of(headers, task_id) is not None:
            del headers[STAMP_HEADER]
            leaf["options"] = {**options, "headers": headers}
