"""What a body returned, held so that no signal can come between its return and the note of it."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeVar

T = TypeVar("T")


class Outcome(defaultdict[None, T]):
    """What a body returned, once it did: ``outcome = Outcome(body)``, then :meth:`run`.

    A time limit or SIGTERM is an exception that a signal handler raises between any two bytecodes. Between the return
    of the body and ``value = …`` it would leave a run that took effect and does not know it, and so is released and
    done again::

        value = body()     effect ─ return ─ [SoftTimeLimitExceeded] ─ value is not set: released, runs again ✗
        outcome.run()      effect ─ return and store, one step ─ [SoftTimeLimitExceeded] ─ returned: settled  ✓

    A ``defaultdict`` calls its factory for a missing key and stores what that returned within one function in C, where
    no signal handler runs. So there is a value exactly if the body returned.
    """

    __slots__ = ()

    def run(self) -> T:
        """Call the body; only once."""
        return self[None]

    @property
    def returned(self) -> bool:
        """Did the body return?"""
        return None in self

    @property
    def value(self) -> T:
        """What it returned."""
        return self[None]
