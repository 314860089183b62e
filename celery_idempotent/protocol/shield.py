"""The shield: time limits and SIGTERM strike in the body of a task, and nowhere else in a run.

In a pool child the handlers of the soft time limit (SIGUSR1) and of SIGTERM raise an exception between any two
instructions. The shield wraps both, once in each pool child::

    claim ──────────── body ──────────── settle ──────────── return
      noted: raised      raised here       noted: a soft limit is dropped, its task is over;
      where the body                       SIGTERM ends the process now
      would begin

A signal also ends the wait for a verb of the store, which is then asked again as if its answer had been lost; after
SIGTERM once. A function of ``run.py`` is never struck: the outcome of its ``body()`` must not be lost. (From Python
3.11 on handlers run at the start of a function, after a call of a C function, and at the end of a loop: not between
``open()`` and the body.) If a ``KeyboardInterrupt`` strikes a verb of the store, the lease ends the claim.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

logger = logging.getLogger(__name__)

#: Functions of this module are never struck.
_PROTOCOL = f"{__package__}.run"


class VerbInterruptedError(Exception):
    """A signal ended the wait for the store, which drops its connection; no error of the store's."""


class Shield:
    """Holds back the given signals in one thread; threads that get no signals share one without any."""

    #: Signals are noted instead of raised.
    closed = False
    #: The run waits for a verb of the store, which it asks again if a signal comes.
    waiting = False
    #: SIGTERM came.
    ending = False

    def __init__(self, *signals: int) -> None:
        self._noted: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        for signum in signals:
            handler = signal.getsignal(signum)
            if callable(handler):
                self._handlers[signum] = handler
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        in_protocol = frame is not None and frame.f_globals.get("__name__") == _PROTOCOL
        if not self.closed and not in_protocol:
            self._handlers[signum](signum, frame)
            return
        self._noted.append(signum)
        self.ending = self.ending or signum == signal.SIGTERM
        if self.waiting and not in_protocol:
            self.waiting = False
            raise VerbInterruptedError("the store was not waited for: a signal came")

    def open(self) -> None:
        """Let signals strike, noted ones first."""
        self.closed = self.waiting = False
        while self._noted:
            signum = self._noted.pop(0)
            self._handlers[signum](signum, None)

    def let_exit(self) -> None:
        """Let the process end now if it is to end: its message goes back to the broker."""
        if self.ending:
            self.open()

    def leave(self, *, was_closed: bool, nested: bool) -> None:
        """Leave it as it was, and raise the noted signals, a soft time limit only in a run ``nested`` in another."""
        self.closed, self.waiting = was_closed, False
        if not self._noted or was_closed:
            return
        if not nested and signal.SIGUSR1 in self._noted:
            logger.warning("idempotency: a soft time limit came after its task had ended")
            self._noted = [signum for signum in self._noted if signum != signal.SIGUSR1]
        self.open()

    def pause(self, seconds: float) -> bool:
        """Sleep, but no longer than until a signal is noted: ``False`` then."""
        if not self._handlers:
            time.sleep(seconds)
            return True
        until, known = time.monotonic() + seconds, len(self._noted)
        while len(self._noted) == known:
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, 0.05))
        return False


#: The shields of threads by ``threading.get_ident()``, and that of all others.
shields: dict[int, Shield] = {}
NO_SHIELD = Shield()


def install(*signals: int) -> None:
    """Hold these signals back in this thread, the main one, from now on."""
    shields[threading.get_ident()] = Shield(*signals)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shields.clear)
