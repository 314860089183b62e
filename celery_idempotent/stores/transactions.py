"""What a run sees of the transaction of a store's database that it is part of."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Protocol

from celery_idempotent.records import SettleRequest


class Transaction(Protocol):
    """A transaction of the store's database that a run is part of."""

    def settle(self, request: SettleRequest) -> bool:
        """Write the end state, to be committed with the rest; ``False`` if the key has another token by now."""
        ...

    def passes(self, error: Exception, *, at_end: bool) -> bool:
        """Is this an error that the same body may not meet again?

        The loss of the session or, from :meth:`settle` or the commit (``at_end``), a serialization failure or deadlock.
        """
        ...

    def has(self, connection: object) -> bool:
        """Is this the connection of another thread, to the same database?"""
        ...

    def outside(self) -> AbstractContextManager[None]:
        """Refuse writes to the transaction's database: what happens in here outlives a rollback.

        :exc:`~celery_idempotent.errors.IdempotencyError` for a statement that writes.
        """
        ...
