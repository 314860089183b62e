"""The shield: time limits and SIGTERM strike in the body of a task, and nowhere else in a run.

A pool child gets a soft time limit (SIGUSR1) and the order to end (SIGTERM) as an exception that a signal handler
raises between two instructions. The shield wraps both handlers, once in each pool child::

    claim ──────────── body ──────────── settle ──────────── return
      noted: raised      raised here       noted: a soft limit is dropped, its task is over;
      where the body                       SIGTERM ends the process now
      would begin

While a verb of the store is under way, a signal also ends the waiting: the verb raises :class:`VerbInterruptedError`,
and is asked again as if its answer had been lost. A SIGTERM leaves it that one try.

A function of ``run.py`` itself is never struck: when its ``body()`` has returned or failed, what became of it must not
be lost. (From Python 3.11 on no signal strikes between ``open()`` and the body: handlers run at the start of a
function, after a call of a C function, and at the end of a loop.)

Greenlets and ``KeyboardInterrupt`` do not come by these signals: they strike while a greenlet waits, that is, in the
body or within a verb of the store, and there the protocol expects any exception.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger(__name__)

#: A pause looks for noted signals this often, in seconds.
_LOOK = 0.05


class VerbInterruptedError(Exception):
    """The store was not waited for, because a signal came.

    No error of the store's: it may strike in the middle of an exchange, and a store then drops its connection.
    """


class Shield:
    """What holds signals back in one thread; this one, for threads that get no signals, holds back nothing."""

    #: Are signals noted instead of raised?
    closed = False
    #: Is a verb of the store under way, to be asked again if it is interrupted? The run sets it.
    waiting = False
    #: Is the process to end?
    ending = False

    def close(self) -> bool:
        """Close the shield; return whether it was closed, for :meth:`leave`."""
        return False

    def open(self) -> None:
        """Let signals strike: first those that were noted."""

    def let_exit(self) -> None:
        """Let the process end now, if it is to: what holds its message gives that back."""

    def leave(self, *, was_closed: bool, nested: bool) -> None:
        """Undo :meth:`close`. A run that was ``nested`` in the body of another hands it the noted signals."""

    def pause(self, seconds: float) -> bool:
        """Sleep, but no longer than until a signal is noted: ``False`` then."""
        time.sleep(seconds)
        return True


class MainThreadShield(Shield):
    """The shield of a pool child's main thread, where Python runs signal handlers."""

    def __init__(self, protocol: dict[str, Any]) -> None:
        self._noted: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._protocol = protocol

    def wrap(self, signum: int) -> None:
        """Put this shield before the handler of a signal."""
        handler = signal.getsignal(signum)
        if callable(handler):
            self._handlers[signum] = handler
            signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        in_protocol = frame is not None and frame.f_globals is self._protocol
        if not self.closed and not in_protocol:
            self._handlers[signum](signum, frame)
            return
        self._noted.append(signum)
        self.ending = self.ending or signum == signal.SIGTERM
        if self.waiting and not in_protocol:
            self.waiting = False
            raise VerbInterruptedError("the store was not waited for: a signal came")

    def close(self) -> bool:
        """Close the shield; return whether it was closed."""
        was_closed, self.closed = self.closed, True
        return was_closed

    def open(self) -> None:
        """Let signals strike: first those that were noted."""
        self.closed = self.waiting = False
        while self._noted:
            signum = self._noted.pop(0)
            self._handlers[signum](signum, None)

    def let_exit(self) -> None:
        """Let the process end now, if it is to."""
        if self.ending:
            self.open()

    def leave(self, *, was_closed: bool, nested: bool) -> None:
        """Undo :meth:`close`; what was noted is raised, but a soft time limit only for a run around this one."""
        self.closed, self.waiting = was_closed, False
        if not self._noted or was_closed:
            return
        if not nested and signal.SIGUSR1 in self._noted:
            logger.warning("idempotency: a soft time limit came after its task had ended")
            self._noted = [signum for signum in self._noted if signum != signal.SIGUSR1]
        self.open()

    def pause(self, seconds: float) -> bool:
        """Sleep, but no longer than until a signal is noted: ``False`` then."""
        until, known = time.monotonic() + seconds, len(self._noted)
        while len(self._noted) == known:
            left = until - time.monotonic()
            if left <= 0:
                return True
            time.sleep(min(left, _LOOK))
        return False


#: The shield of each thread that has one of its own, by ``threading.get_ident()``, and that of all others.
shields: dict[int, Shield] = {}
NO_SHIELD = Shield()


def install(*signals: int, protocol: dict[str, Any]) -> None:
    """Hold these signals back in this thread, the main one, from now on; ``protocol`` are the globals of ``run.py``."""
    made = MainThreadShield(protocol)
    for signum in signals:
        made.wrap(signum)
    shields[threading.get_ident()] = made


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shields.clear)
