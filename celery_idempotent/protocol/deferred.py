"""Ends of eager runs that wait for the caller's transaction: a record says done once that is committed, not before.

::

    atomic() ─ task.apply() ─ claim ─ body ─ its end waits ─┬─ COMMIT ───▶ settle
                                                            └─ ROLLBACK ─▶ release: nothing was done

Django calls what waits for a commit, and drops it at a rollback, also at one to a savepoint. So the end has
weak references to what it gave to Django, and was rolled back if one of them is gone: the next eager call looks, and
the heartbeat, which renews the claim until then.
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

#: Takes a function that is to be called after the commit of one transaction, or never.
OnCommit = Callable[[Callable[[], None]], None]

_waiting: dict[tuple[Identity, int], DeferredEnd] = {}


def _claim_id(record: Record) -> tuple[Identity, int]:
    return record.identity, record.token


class DeferredEnd:
    """The end of one run; ``record`` is what the run made of it, as those see it who are in the same transaction."""

    def __init__(
        self,
        claim: Claim,
        record: Record,
        *,
        settle: Callable[[], object],
        release: Callable[[], object],
    ) -> None:
        self.record = record
        self.claim = _claim_id(record)
        self.lease: Renewal = claim.lease
        self.store: Store = claim.store
        self.renewed_at = claim.renewed_at
        self._settle = settle
        self._release = release
        self._thread = threading.get_ident()
        self._hooks: list[weakref.ref[_Hook]] = []

    @property
    def over(self) -> bool:
        """Is there nothing to keep alive any more? The heartbeat asks before it renews."""
        self.release_if_rolled_back()
        return self.claim not in _waiting

    def lose(self) -> None:
        """Do nothing: the store will refuse the settle, too."""

    @property
    def here(self) -> bool:
        """Is the code at work in the same transaction?"""
        return self._thread == threading.get_ident() and not self._rolled_back

    @property
    def _rolled_back(self) -> bool:
        # The heartbeat's thread asks, too. What is gone because it was called is out of the list before it is gone.
        return any(hook() is None and hook in self._hooks for hook in tuple(self._hooks))

    def wait_for(self, transactions: Sequence[OnCommit]) -> None:
        """Wait for the end of these."""
        hooks = [_Hook(self) for _ in transactions]
        self._hooks = [weakref.ref(hook) for hook in hooks]
        _waiting[self.claim] = self
        heartbeat.add(self)
        for on_commit, hook in zip(transactions, hooks, strict=True):
            on_commit(hook)

    def committed(self, hook: _Hook) -> None:
        """Settle, if that was the last of the transactions."""
        self._hooks.remove(weakref.ref(hook))
        if not self._hooks and self._taken():
            self._settle()

    def release_if_rolled_back(self) -> None:
        """Free the key if the transaction was rolled back."""
        if self._rolled_back and self._taken():
            self._release()

    def _taken(self) -> bool:
        """Is it up to us to end it? To one only."""
        if _waiting.pop(self.claim, None) is None:
            return False
        heartbeat.remove(self)
        return True


class _Hook:
    """What Django calls after a commit."""

    __slots__ = ("__weakref__", "_end")

    def __init__(self, end: DeferredEnd) -> None:
        self._end = end

    def __call__(self) -> None:
        self._end.committed(self)


def defer(end: DeferredEnd, transactions: Sequence[OnCommit]) -> None:
    """Let an end wait, unless it does."""
    if end.claim not in _waiting:
        end.wait_for(transactions)


def end_of(record: Record) -> Record | None:
    """Return what a run in the same transaction made of a held record, ``None`` if it is another's."""
    end = _waiting.get(_claim_id(record))
    return end.record if end is not None and end.here else None


def release_rolled_back() -> None:
    """Free the keys of all runs whose transaction was rolled back."""
    for end in tuple(_waiting.values()):
        end.release_if_rolled_back()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_waiting.clear)  # they are the parent's
