"""When to leave a server alone that did not answer, so that waiting for it does not slow every call."""

from __future__ import annotations

import time
from collections.abc import Callable

from celery_idempotent import backoff

#: The first pause after a failure and the longest one, in seconds.
FIRST_PAUSE = 1.0
LONGEST_PAUSE = 10.0


class Breaker:
    """Counts failures in a row, and says whether to try.

    Of many threads, one tries at the end of a pause; the others go on without until it succeeded.
    Needs no lock: what a race costs is one more try.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._until = 0.0

    @property
    def open(self) -> bool:
        """Did the last try fail?"""
        return self._failures > 0

    def allows(self) -> bool:
        """May the caller try? The first one after a pause may; it then reports how that went."""
        if not self._failures:
            return True
        now = self._clock()
        if now < self._until:
            return False
        self._until = now + self._pause()
        return True

    def failed(self) -> None:
        """Note a try that failed: the next one is a pause away."""
        self._failures += 1
        self._until = self._clock() + self._pause()

    def succeeded(self) -> None:
        """Note a try that succeeded: no more pauses."""
        self._failures = 0

    def _pause(self) -> float:
        return backoff.seconds(max(self._failures, 1), first=FIRST_PAUSE, longest=LONGEST_PAUSE)
