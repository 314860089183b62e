"""A clock that tests move by hand."""

from __future__ import annotations

_START_US = 1_700_000_000_000_000


class FakeClock:
    """Gives the time in microseconds since the epoch; it stands still until it is moved.

    ::

        clock = FakeClock()
        store = MemoryStore(clock)
        clock.advance(60_000)  # A minute later.
    """

    def __init__(self, start_us: int = _START_US) -> None:
        self._now_us = start_us

    def __call__(self) -> int:
        """Return the time."""
        return self._now_us

    def advance(self, ms: float) -> None:
        """Let ``ms`` milliseconds pass."""
        self._now_us += round(ms * 1000)
