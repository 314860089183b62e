"""Counting outcomes for operators: added up in each process, written by the heartbeat's thread, kept by the hour.

Counting costs a run less than a microsecond and no round trip. A process that ends writes what is left; one that is
killed takes it along: these are figures for charts, not for the books.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING

from celery_idempotent.errors import IdempotencyError

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: A process writes what it counted at most so often, in seconds.
WRITE_EVERY = 5.0

#: So many different tasks and outcomes wait to be written while a store is down, the rest is dropped.
MOST = 10_000


class Counters:
    """How often each outcome came about in this process since that was written last, by store and task."""

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        # No lock, and no weak references: an exception may strike wherever a run counts.
        self._counts: dict[Store, Counter[tuple[str, str]]] = {}
        self._written = time.monotonic()

    def add(self, store: Store, task: str, outcome: str) -> None:
        """Count one outcome; the heartbeat writes it in a few seconds, or the caller, with :meth:`write`."""
        counts = self._counts.get(store)
        if counts is None:
            if not store.supports_counting:
                return
            counts = self._counts.setdefault(store, Counter())
        counts[task, outcome] += 1

    @property
    def empty(self) -> bool:
        """Is everything written?"""
        return not self._counts

    def beat(self) -> None:
        """Write what was counted, if it is time."""
        if time.monotonic() - self._written >= WRITE_EVERY:
            self.write()

    def write(self) -> None:
        """Write what was counted, now; what a store does not take is kept for the next time.

        Any thread may: each takes what it writes out of the counters first. A lock would stay locked if a time limit
        struck its owner, and nothing would be counted from then on.
        """
        self._written = time.monotonic()
        for store in list(self._counts):
            self._write(store)

    def _write(self, store: Store) -> None:
        # A thread that counts meanwhile adds to a new counter, or adds the last count to this one.
        counts = self._counts.pop(store, None)
        if not counts:
            return
        try:
            store.count(dict(counts))
        except IdempotencyError as error:
            logger.debug("idempotency: outcomes are counted later: %s", error)
            if len(counts) < MOST:
                self._counts.setdefault(store, Counter()).update(counts)
        except Exception:
            logger.exception("idempotency: outcomes could not be counted")


#: The counters of this process.
counters = Counters()
