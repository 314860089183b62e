"""Which transaction the running code belongs to, and whether that is one of Django's test tools.

A ``TestCase`` keeps each test in a transaction of the thread's connection and rolls it back, so whatever is to be gone
with the test has to be written there, by the thread of the test.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from django.db import connections

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.protocol.claim import current_claim

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from celery_idempotent.protocol.run import OnCommit
    from celery_idempotent.stores.base import Store


def alias_in_use() -> str | None:
    """Return the database whose transaction the running atomic task will commit with its record; else ``None``."""
    claim = current_claim()
    if claim is None or claim.transaction is None:
        return None
    alias = claim.store.outbox_alias
    return alias if alias is not None and connections[alias].in_atomic_block else None


def transactions_around(store: Store) -> Sequence[OnCommit]:
    """Return the ``on_commit`` of each open transaction of this thread, a test's excepted.

    None if the store's verbs join one.
    """
    if store.joined():
        return ()
    return [
        partial(first_on_commit, own)
        for own in connections.all(initialized_only=True)
        # Without the last, the project commits by hand, and Django calls no function after it.
        if own.in_atomic_block
        and not all(map(is_testcase, own.atomic_blocks))
        and own.commit_on_exit
    ]


def is_testcase(block: object) -> bool:
    """Is this one of the blocks that Django's ``TestCase`` opens around a test?"""
    return bool(getattr(block, "_from_testcase", False))


def in_testcase(own: BaseDatabaseWrapper) -> bool:
    """Is the thread's connection in the transaction of a ``TestCase``, which will be rolled back?"""
    return any(map(is_testcase, own.atomic_blocks[:1]))


def first_on_commit(own: BaseDatabaseWrapper, function: Callable[[], None]) -> None:
    """Have a function called after the COMMIT of an open transaction, before the others that wait for it.

    The first of them that raises stops all after it, and Django drops those, as it does after a rollback.
    """
    own.on_commit(function, robust=True)
    if not in_testcase(own):  # where captureOnCommitCallbacks() counts on the order
        own.run_on_commit.insert(0, own.run_on_commit.pop())


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
