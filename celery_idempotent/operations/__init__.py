"""What people who run tasks ask and do: which records there are, why one is as it is, and what may be done to it.

One set for the command line, the admin and code. Nothing here asks or prints. An operation takes this way::

    cli/operations ───────────────┐
                                  ├─ operations/acting: execute ─┐
    django/admin/operations ──────┘                              ├─ celery/operations: operate
                                                                 │     guards, notes who and why
    task.idempotency_release() ─ celery/operations: operate_or_raise ───────────┘     │
                                                                                      ▼
                                                             Operator: writes, reports ─▶ the store
"""

from __future__ import annotations

from celery_idempotent.celery.operations import OperationRequest, Outcome, operate
from celery_idempotent.operations.explaining import Story, story_of
from celery_idempotent.operations.finding import (
    Found,
    find_key,
    find_key_anywhere,
    find_task_id,
    pages,
)

__all__ = [
    "Found",
    "OperationRequest",
    "Outcome",
    "Story",
    "find_key",
    "find_key_anywhere",
    "find_task_id",
    "operate",
    "pages",
    "story_of",
]
