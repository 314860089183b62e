"""Pauses between tries: each about twice as long as the last one, with jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from celery_idempotent.errors import StoreUnavailable

T = TypeVar("T")

#: The default of the first and of the longest pause, in seconds.
FIRST, LONGEST = 0.05, 5.0


def seconds(failures: int, *, first: float = FIRST, longest: float = LONGEST) -> float:
    """Return the pause after so many failures in a row: a random time of at least half of the doubled pause."""
    return min(first * 2.0 ** min(failures - 1, 30), longest) * random.uniform(0.5, 1)


def pause(
    failures: int, *, until: float = float("inf"), first: float = FIRST, longest: float = LONGEST
) -> bool:
    """Wait before the next try, the last one at ``until`` (``time.monotonic``); ``False`` if that has passed."""
    left = until - time.monotonic()
    if left <= 0:
        return False
    time.sleep(min(seconds(failures, first=first, longest=longest), left))
    return True


def persist(
    ask: Callable[[], T],
    *,
    until: float,
    errors: type[Exception] | tuple[type[Exception], ...] = StoreUnavailable,
    longest: float = LONGEST,
) -> T:
    """Return the answer of ``ask``, called again after each of ``errors`` until ``until``; raise the last one."""
    failures = 0
    while True:
        try:
            return ask()
        except errors:  # noqa: PERF203  one try failed, and the next may not
            failures += 1
            if not pause(failures, until=until, longest=longest):
                raise
