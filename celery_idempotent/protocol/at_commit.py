"""Settles an eager run that ended inside the caller's transaction: after the COMMIT. After a ROLLBACK it is released.

::

    atomic() ─ task.apply() ─ claim ─ body ─ pending ─┬─ COMMIT ───▶ settle
                                                      └─ ROLLBACK ─▶ release: the effect is undone

Django calls the functions given to ``on_commit``, the hooks, after the COMMIT. It has no hook for a rollback, also one
to a savepoint; but then it drops these hooks without calling them. So a pending settle has only weak references to its
hooks: if one of them is dead and was not called, there was a rollback. Each eager call looks for that when it begins,
and the heartbeat before each renewal: it renews the claim for as long as the settle is pending.
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

#: The ``on_commit`` of one open transaction: ``on_commit(hook)`` has Django call ``hook()`` after the COMMIT.
OnCommit = Callable[[Callable[[], None]], None]

#: The pending settles of this process, each by the identity and the token of its claim.
_pending: dict[tuple[Identity, int], PendingSettle] = {}


def _claim_id(record: Record) -> tuple[Identity, int]:
    return record.identity, record.token


class PendingSettle:
    """The settle of one run, which is due after the COMMIT of the caller's transactions.

    ``record`` is the record as that settle will make it. A duplicate in the same transaction is answered from it::

        with transaction.atomic():
            charge.apply((17,))     runs; the settle is pending, and the store still says PROCESSING
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
        self.renewal: Renewal = claim.renewal
        self.store: Store = claim.store
        self.renewed_at = claim.renewed_at
        self._settle = settle
        self._release = release
        self._thread = threading.get_ident()
        self._hook_refs: list[weakref.ref[_Hook]] = []

    def prepare_renewal(self) -> bool:
        """Release the key if a transaction was rolled back; return whether the settle is still pending.

        The heartbeat calls this, and so notices a rollback where no further eager call looks for it.
        """
        self.release_if_rolled_back()
        return self.claim_id in _pending

    def lose(self) -> None:
        """Do nothing: after the COMMIT the settle is tried all the same.

        It succeeds if there is no newer claim of the key, and reports the lost lease if there is.
        """

    @property
    def in_this_transaction(self) -> bool:
        """Is the caller in the transaction of the run? That belongs to one thread, and may be rolled back by now."""
        return self._thread == threading.get_ident() and not self._rolled_back

    @property
    def _rolled_back(self) -> bool:
        # A hook that was called is dead soon, too; after_commit() removes its reference before. The heartbeat's thread
        # may have copied the list earlier: so a dead reference counts only if the list still has it.
        return any(ref() is None and ref in self._hook_refs for ref in tuple(self._hook_refs))

    def register(self, on_commits: Sequence[OnCommit]) -> None:
        """Register one hook for each of these transactions: settle once all are committed, release if one is not."""
        hooks = [_Hook(self) for _ in on_commits]
        self._hook_refs = [weakref.ref(hook) for hook in hooks]
        _pending[self.claim_id] = self
        heartbeat.add(self)
        for on_commit, hook in zip(on_commits, hooks, strict=True):
            on_commit(hook)

    def after_commit(self, hook: _Hook) -> None:
        """Settle, if all the other transactions are committed as well."""
        self._hook_refs.remove(weakref.ref(hook))
        if not self._hook_refs and self._remove():
            self._settle()

    def release_if_rolled_back(self) -> None:
        """Release the key if a transaction was rolled back."""
        if self._rolled_back and self._remove():
            self._release()

    def _remove(self) -> bool:
        """Make this no longer pending; ``False`` if another thread did: only one of them may settle or release."""
        if _pending.pop(self.claim_id, None) is None:
            return False
        heartbeat.remove(self)
        return True


class _Hook:
    """What Django calls after a commit, and drops at a rollback."""

    __slots__ = ("__weakref__", "_pending_settle")

    def __init__(self, pending_settle: PendingSettle) -> None:
        self._pending_settle = pending_settle

    def __call__(self) -> None:
        self._pending_settle.after_commit(self)


def settle_after_commit(pending: PendingSettle, on_commits: Sequence[OnCommit]) -> None:
    """Have a run settled after these transactions. If a settle of its claim is pending already, nothing happens."""
    if pending.claim_id not in _pending:
        pending.register(on_commits)


def record_after_commit(record: Record) -> Record | None:
    """Return the record that a pending settle of the caller's own transaction will write.

    ``record`` is the one that the store has now. ``None`` if no such settle is pending for its claim.
    """
    pending = _pending.get(_claim_id(record))
    return pending.record if pending is not None and pending.in_this_transaction else None


def release_rolled_back() -> None:
    """Release the keys of all runs whose transaction was rolled back."""
    for pending in tuple(_pending.values()):
        pending.release_if_rolled_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pending.clear)  # the parent settles or releases them
