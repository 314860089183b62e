"""Whether Django's own test tools are at work, which undo what a test wrote and drop its database.

A ``TestCase`` keeps each test in a transaction of the thread's connection and rolls it back, so whatever is to be gone
with the test has to be written there, by the thread of the test.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from celery_idempotent.errors import IdempotencyError

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper


def in_testcase(own: BaseDatabaseWrapper) -> bool:
    """Is the thread's connection in the transaction of a ``TestCase``, which will be rolled back?"""
    blocks = own.atomic_blocks
    return bool(blocks) and bool(getattr(blocks[0], "_from_testcase", False))


def under_test() -> bool:
    """Is Django's test environment set up (``manage.py test``, pytest-django)?"""
    utils = sys.modules.get("django.test.utils")
    return hasattr(getattr(utils, "_TestState", None), "saved_data")


def close_before_fork() -> None:
    """Close the connections of this thread, so that a child opens its own.

    Raises:
        IdempotencyError: if a child would not see what this process wrote.
    """
    from django.conf import settings
    from django.db import connections

    if not settings.configured:
        return
    for own in connections.all(initialized_only=True):
        if own.in_atomic_block:
            raise IdempotencyError(
                "the test is in a transaction, which no other process sees: use a TransactionTestCase, or "
                "pytest.mark.django_db(transaction=True)"
            )
        if under_test() and own.vendor == "sqlite" and own.is_in_memory_db():  # type: ignore[attr-defined]
            raise IdempotencyError(
                "a SQLite database in memory is one process's own: give the test database a file, "
                '"TEST": {"NAME": "test.sqlite3"}'
            )
        own.close()
