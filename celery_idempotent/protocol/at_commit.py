"""The end of an eager run inside the caller's transaction: it is written after the COMMIT, and not if that never comes.

::

    atomic() ─ task.apply() ─ claim ─ body ─ its end waits ─┬─ COMMIT ───▶ settle
                                                            └─ ROLLBACK ─▶ release: the effect is undone

Django has no hook for a rollback, but it drops the ``on_commit`` hooks then, also at a rollback to a savepoint. So an
end has only weak references to its hooks, and a hook that is gone without having been called means a rollback. The next
eager call looks for that, and so does the heartbeat, which renews the claim until then.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from celery_idempotent.protocol.lease import heartbeat
from celery_idempotent.records import Identity, Record, Renewal

if TYPE_CHECKING:
    from celery_idempotent.protocol.claim import Claim
    from celery_idempotent.stores.base import Store

#: ``transaction.on_commit`` of one transaction: takes a function to call after its commit.
OnCommit = Callable[[Callable[[], None]], None]

#: The ends of this process that wait, by their claims: the identity and the token.
_waiting: dict[tuple[Identity, int], EndAtCommit] = {}


def _claim_id(record: Record) -> tuple[Identity, int]:
    return record.identity, record.token


class EndAtCommit:
    """The end of one run, which waits for the COMMIT of the caller's transactions.

    ``record`` is what the record will be after that. A duplicate in the same transaction is answered from it::

        with transaction.atomic():
            charge.apply((17,))     runs; its end waits, the store still says PROCESSING
            charge.apply((17,))     the same key: a replay of the first, though the store has no result yet
    """

    def __init__(
        self,
        claim: Claim,
        record: Record,
        *,
        settle: Callable[[], object],
        release: Callable[[], object],
    ) -> None:
        self.record = record
        self.claim_id = _claim_id(record)
        self.lease: Renewal = claim.lease
        self.store: Store = claim.store
        self.renewed_at = claim.renewed_at
        self._settle = settle
        self._release = release
        self._thread = threading.get_ident()
        self._hooks: list[weakref.ref[_Hook]] = []

    def prepare_renewal(self) -> bool:
        """Release the key if the transaction was rolled back; return whether the end still waits for its commit.

        This is how a rollback is noticed where no further eager call looks for it: by the next beat of the heartbeat.
        """
        self.release_if_rolled_back()
        return self.claim_id in _waiting

    def lose(self) -> None:
        """Do nothing: the store will refuse the settle, too."""

    @property
    def in_this_transaction(self) -> bool:
        """Is the code that asks in the same transaction? Django has one for each thread and database."""
        return self._thread == threading.get_ident() and not self._rolled_back

    @property
    def _rolled_back(self) -> bool:
        # Django drops the hooks of a rollback without calling them. committed() takes its hook off the list first; the
        # heartbeat's thread may look meanwhile, so a hook that is gone counts only if it is on the list still.
        return any(hook() is None and hook in self._hooks for hook in tuple(self._hooks))

    def wait_for(self, transactions: Sequence[OnCommit]) -> None:
        """Wait until all of these transactions are committed, or one is rolled back."""
        hooks = [_Hook(self) for _ in transactions]
        self._hooks = [weakref.ref(hook) for hook in hooks]
        _waiting[self.claim_id] = self
        heartbeat.add(self)
        for on_commit, hook in zip(transactions, hooks, strict=True):
            on_commit(hook)

    def committed(self, hook: _Hook) -> None:
        """Settle, if this is the hook of the last of the transactions."""
        self._hooks.remove(weakref.ref(hook))
        if not self._hooks and self._stop_waiting():
            self._settle()

    def release_if_rolled_back(self) -> None:
        """Release the key if the transaction was rolled back."""
        if self._rolled_back and self._stop_waiting():
            self._release()

    def _stop_waiting(self) -> bool:
        """Remove the end from those that wait; ``False`` if another thread did: only one may settle or release."""
        if _waiting.pop(self.claim_id, None) is None:
            return False
        heartbeat.remove(self)
        return True


class _Hook:
    """What Django calls after a commit, and drops at a rollback."""

    __slots__ = ("__weakref__", "_end")

    def __init__(self, end: EndAtCommit) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end.committed(self)


def wait_for_commit(end: EndAtCommit, transactions: Sequence[OnCommit]) -> None:
    """Let an end wait for these transactions. If an end of this claim waits already, nothing happens."""
    if end.claim_id not in _waiting:
        end.wait_for(transactions)


def record_after_commit(record: Record) -> Record | None:
    """Return how a held record will end, ``None`` if its run is not one that ended in the caller's transaction."""
    end = _waiting.get(_claim_id(record))
    return end.record if end is not None and end.in_this_transaction else None


def release_rolled_back() -> None:
    """Release the keys of all runs whose transaction was rolled back."""
    for end in tuple(_waiting.values()):
        end.release_if_rolled_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)  # the parent ends them
