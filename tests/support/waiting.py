"""Waiting for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(
    condition: Callable[[], T],
    timeout: float = 30.0,
    what: str | Callable[[], str] = "the condition",
    *,
    interval: float = 0.02,
) -> T:
    """Return the first true value of ``condition``; fail after ``timeout`` seconds, saying ``what`` did not come.

    It looks at once and then more and more seldom, down to ten times a second: many wait at a time, on few cores.
    ``what`` may be a callable, asked only at the end: ``what=lambda: f"two runs, ledger: {ledger.entries()}"``.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            what = what() if callable(what) else what
            raise AssertionError(f"waited {timeout:g} s in vain for {what}; last value: {value!r}")
        time.sleep(interval)
        interval = max(interval, min(1.5 * interval, 0.1))
