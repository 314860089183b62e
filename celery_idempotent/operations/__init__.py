"""What people who run tasks ask and do: which records there are, why one is as it is, and what may be done to it.

One set for the command line, the admin and code. Nothing here asks or prints. An operation takes this way::

    cli/operations ───────────────┐
                                  ├─ operations/bulk: execute ─┐
    django/admin/operations ──────┘                            ├─ celery/operations: operate
                                                               │     guards, notes who and why
    task.idempotency_release() ─ celery/operations: operate_or_raise ─────────┘     │
                                                                                    ▼
                                                           celery/operator: writes, reports ─▶ the store

``operate`` guards all of them: it leaves alone a record that has changed since it was seen, and, unless it is forced,
one with a live owner.
"""

from __future__ import annotations

from celery_idempotent.celery.operations import (
    ON_MANY,
    OPERATIONS,
    Operation,
    OperationRequest,
    Outcome,
    is_live,
    offered,
    operate,
)
from celery_idempotent.operations.choosing import Choice
from celery_idempotent.operations.explaining import Story, story_of, story_of_nothing
from celery_idempotent.operations.finding import (
    Found,
    find_key,
    find_key_anywhere,
    find_task_id,
    pages,
)

__all__ = [
    "ON_MANY",
    "OPERATIONS",
    "Choice",
    "Found",
    "Operation",
    "OperationRequest",
    "Outcome",
    "Story",
    "find_key",
    "find_key_anywhere",
    "find_task_id",
    "is_live",
    "offered",
    "operate",
    "pages",
    "story_of",
    "story_of_nothing",
]
