"""One thread with a bounded queue: writes of a worker's main process, which must not wait for the store.

A worker's main process (of the prefork pool) talks to the broker and looks after its children. If it waited for a store
that does not answer, no task would be started and no time limit kept. So it leaves two kinds of writes to this thread:

- a child is gone: *interrupt* its claim, so that the next delivery runs now and not when the lease is over (urgent);
- a message had expired or was revoked before it ran: *release* the key that its publisher reserved.

If such a write is lost, nothing breaks: the lease, or the deadline of the reservation, does the same later.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from typing import Protocol

from celery_idempotent import backoff
from celery_idempotent.errors import StoreUnavailable

logger = logging.getLogger(__name__)

#: So many jobs wait at most. Of one that is dropped, a lease or a deadline does the work later.
MAX_JOBS = 10_000

#: The pauses between two tries while a store does not answer, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0


class Job(Protocol):
    """Something to do, in steps, until ``give_up`` (``time.monotonic``) if the store does not answer.

    As a text it completes *could not …*.
    """

    @property
    def urgent(self) -> bool:
        """Does it come before all that are not?"""
        ...

    @property
    def give_up(self) -> float:
        """Until when it is tried again."""
        ...

    def step(self) -> float | None:
        """Do what can be done now; return in how many seconds to go on, ``None`` if it is done.

        Raises:
            StoreUnavailable: if it is to be tried again.
        """
        ...


class Background:
    """Does jobs, a step at a time, in one daemon thread, which ends when none is left.

    The pool may fork at any moment: a child has no jobs, and what is done here must not import anything, for a child
    would find the lock of that module taken for ever. While a store does not answer, all jobs wait for it: there are
    hundreds when a queue was full of expired messages, and each try may take as long as the store's timeout.
    """

    def __init__(self, limit: int = MAX_JOBS) -> None:
        self._limit = limit
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._changed = threading.Condition()
        # By due time and age.
        self._urgent: list[tuple[float, int, Job]] = []
        self._others: list[tuple[float, int, Job]] = []
        self._ages = itertools.count()
        self._running = False
        self._full = False

    def put(self, job: Job) -> None:
        """Have the job done; if too many wait, the oldest goes."""
        logged = True
        with self._changed:
            if len(self._urgent) + len(self._others) >= self._limit:
                logged, self._full = self._full, True
                heapq.heappop(self._others or self._urgent)
            self._add(job, 0)
            if not self._running:
                self._start()
            self._changed.notify()
        if not logged:
            logger.warning(
                "idempotency: more than %d claims of lost processes and keys of expired messages wait for the store: "
                "the oldest are left to their leases and deadlines",
                self._limit,
            )

    def _start(self) -> None:
        # Before the start: where threads are greenlets, this one may be done by the time that it returns.
        self._running = True
        try:
            threading.Thread(target=self._work, name="idempotency-background", daemon=True).start()
        except BaseException:
            self._running = False
            raise

    def _add(self, job: Job, seconds: float) -> None:
        heap = self._urgent if job.urgent else self._others
        heapq.heappush(heap, (time.monotonic() + seconds, next(self._ages), job))

    def _work(self) -> None:
        failures = 0
        while (job := self._next()) is not None:
            again: float | None = None
            try:
                again = job.step()
                failures = 0
            except StoreUnavailable as error:
                failures += 1
                if backoff.pause(
                    failures, until=job.give_up, first=_FIRST_PAUSE, longest=_LONGEST_PAUSE
                ):
                    again = 0
                else:
                    logger.warning("idempotency: could not %s: %s", job, error)
            except Exception as error:  # noqa: BLE001  best effort, and the others have their turn
                logger.warning("idempotency: could not %s: %s", job, error)
            if again is not None:
                with self._changed:
                    self._add(job, again)

    def _next(self) -> Job | None:
        """Wait for the next job that is due; ``None`` if there are none, and the thread is to end."""
        with self._changed:
            while heaps := [heap for heap in (self._urgent, self._others) if heap]:
                now = time.monotonic()
                for heap in heaps:
                    if heap[0][0] <= now:
                        return heapq.heappop(heap)[2]
                self._changed.wait(min(heap[0][0] for heap in heaps) - now)
            self._running = self._full = False
            return None


#: The jobs of this process.
background = Background()
