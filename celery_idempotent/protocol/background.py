"""One thread with a queue: writes of a worker's main process, which must not wait for the store.

A worker's main process (of the prefork pool) talks to the broker and looks after its children. If it waited for a store
that does not answer, no task would be started and no time limit kept. So it leaves one kind of write to this thread:
a child is gone, and its claim is *interrupted*, so that the next delivery runs now and not when the lease is over. If
such a write is lost, the lease does the same later.
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

#: The pauses between two tries while a store does not answer, in seconds.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 1.0


class Job(Protocol):
    """Something to do, in steps, until ``give_up`` (``time.monotonic``) if the store does not answer.

    As a text it completes *could not …*.
    """

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
    would find the lock of that module taken for ever. While a store does not answer, all jobs wait for it.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._changed = threading.Condition()
        # By due time and age.
        self._jobs: list[tuple[float, int, Job]] = []
        self._ages = itertools.count()
        self._running = False

    def put(self, job: Job) -> None:
        """Have the job done."""
        with self._changed:
            self._add(job, 0)
            if not self._running:
                self._start()
            self._changed.notify()

    def _start(self) -> None:
        # Before the start: where threads are greenlets, this one may be done by the time that it returns.
        self._running = True
        try:
            threading.Thread(target=self._work, name="idempotency-background", daemon=True).start()
        except BaseException:
            self._running = False
            raise

    def _add(self, job: Job, seconds: float) -> None:
        heapq.heappush(self._jobs, (time.monotonic() + seconds, next(self._ages), job))

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
            while self._jobs:
                left = self._jobs[0][0] - time.monotonic()
                if left <= 0:
                    return heapq.heappop(self._jobs)[2]
                self._changed.wait(left)
            self._running = False
            return None


#: The jobs of this process.
background = Background()
