"""Pauses between tries: each about twice as long as the one before, with jitter."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from celery_idempotent.errors import StoreUnavailable

T = TypeVar("T")

#: The first pause and the longest one, in seconds, where a loop has no reason for others.
FIRST, LONGEST = 0.05, 5.0


def seconds(failures: int, *, first: float = FIRST, longest: float = LONGEST) -> float:
    """Return how long to wait after so many failures in a row: a random time, at least half of the doubled pause."""
    return min(first * 2.0 ** min(failures - 1, 30), longest) * random.uniform(0.5, 1)


def pause(
    failures: int, *, until: float = float("inf"), first: float = FIRST, longest: float = LONGEST
) -> bool:
    """Wait before the next try; return ``False`` at once if ``until`` (``time.monotonic``) has passed.

    The last pause ends exactly then, and one last try follows.
    """
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
    """Return the answer of ``ask``, which is called again after each of ``errors`` until ``until``.

    Raises:
        StoreUnavailable: or another of ``errors``, if no call returned.
    """
    failures = 0
    while True:
        try:
            return ask()
        except errors:  # noqa: PERF203  one try failed, and the next may not
            failures += 1
            if not pause(failures, until=until, longest=longest):
                raise
