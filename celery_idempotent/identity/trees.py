"""The one walk over the signatures of a canvas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from celery_idempotent.identity.stamp import STAMP_HEADER, as_mapping, stamp_of


def canvas_tasks(signature: object) -> Iterator[Mapping[str, Any]]:
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
            yield from canvas_tasks(each)


def unstamp(signature: object, task_id: str | None) -> None:
    """Remove the stamp of the message with this task id from the canvas that replaces it and copied its headers."""
    for task in canvas_tasks(signature):
        options = as_mapping(task.get("options"))
        headers = as_mapping(options.get("headers"))
        if isinstance(task, dict) and stamp_of(headers, task_id) is not None:
            del headers[STAMP_HEADER]
            task["options"] = {**options, "headers": headers}
