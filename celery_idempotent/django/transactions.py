"""Which transaction the code at work belongs to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from django.db import connections

from celery_idempotent.django.testcases import in_testcase
from celery_idempotent.errors import IdempotencyError
from celery_idempotent.protocol.claim import current_claim

if TYPE_CHECKING:
    from django.db.backends.base.base import BaseDatabaseWrapper

    from celery_idempotent.protocol.run import OnCommit
    from celery_idempotent.stores.base import Store


def alias_in_use() -> str | None:
    """Return the database whose transaction the running atomic task will commit with its record; else ``None``.

    Raises:
        IdempotencyError: in another thread than that of the transaction.
    """
    claim = current_claim()
    if claim is None or claim.transaction is None:
        return None
    alias = claim.store.outbox_alias
    if alias is not None and claim.transaction.is_other_connection(connections[alias]):
        raise IdempotencyError(
            "an idempotency_atomic task publishes with its transaction, which belongs to the thread of its body, and "
            "this is another thread: publish from the body"
        )
    return alias if alias is not None and connections[alias].in_atomic_block else None


def transactions_around(store: Store) -> Sequence[OnCommit]:
    """Return the ``on_commit`` of each open transaction of this thread; none if the store's verbs join one.

    The blocks that Django's ``TestCase`` opens around a test do not count.
    """
    if store.joined():
        return ()
    return [
        partial(first_on_commit, own)
        for own in connections.all(initialized_only=True)
        # Without the last, the project commits by hand, and Django calls no function after it.
        if own.in_atomic_block
        and not all(map(_is_testcases, own.atomic_blocks))
        and own.commit_on_exit
    ]


def _is_testcases(block: object) -> bool:
    return bool(getattr(block, "_from_testcase", False))


def first_on_commit(own: BaseDatabaseWrapper, function: Callable[[], None]) -> None:
    """Have a function called after the COMMIT of an open transaction, before the others that wait for it.

    The first of them that raises stops all after it, and Django drops those, as it does after a rollback.
    """
    own.on_commit(function, robust=True)
    if not in_testcase(own):  # where captureOnCommitCallbacks() counts on the order
        own.run_on_commit.insert(0, own.run_on_commit.pop())
