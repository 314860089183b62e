"""The HTTP core, which knows no web framework, and ``enqueue`` and ``task_status`` for a route of any."""

from __future__ import annotations

from celery_idempotent.http.routes import (
    ResponseParts,
    aenqueue,
    atask_status,
    enqueue,
    task_status,
)

__all__ = ["ResponseParts", "aenqueue", "atask_status", "enqueue", "task_status"]
