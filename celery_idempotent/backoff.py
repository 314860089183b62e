"""The pauses of all loops that try again: each twice as long as the one before, and never two alike."""

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
    """Return how long to wait after so many failures in a row.

    Between half and all of the doubled pause, by chance: those that failed together do not try again together.
    """
    return min(first * 2.0 ** min(failures - 1, 30), longest) * random.uniform(0.5, 1)


def pause(
    failures: int, *, until: float = float("inf"), first: float = FIRST, longest: float = LONGEST
) -> bool:
    """Wait before the next try; ``False``, at once, if there is to be none: it is ``until`` (``time.monotonic``).

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
    """Return what ``ask`` answers, which may be asked again when its answer was lost: until then, at these errors.

    Raises:
        StoreUnavailable: or another of ``errors``, if no try had an answer.
    """
    failures = 0
    while True:
        try:
            return ask()
        except errors:  # noqa: PERF203  one try failed, and the next may not
            failures += 1
            if not pause(failures, until=until, longest=longest):
                raise
