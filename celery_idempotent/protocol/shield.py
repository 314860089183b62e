"""The shield: time limits and SIGTERM strike in the body of a task, and nowhere else in a run.

In a pool child the handlers of the soft time limit (SIGUSR1) and of SIGTERM raise an exception between any two
instructions. The shield wraps both, once in each pool child::

    claim ──────────── body ──────────── settle ─── return ─── Celery: callbacks, result, hooks
      noted: raised      raised here       a soft limit is dropped, its task is over;
      where the body                       SIGTERM is noted until the return, and ends the process then
      would begin

A signal also ends the wait for a verb of the store, which is then asked again as if its answer had been lost; after
SIGTERM once. A soft limit that strikes around the body of an eager call is raised in its caller. A function of
``run.py`` is never struck: the outcome of its ``body()`` must not be lost. (From Python 3.11 on handlers run at the
start of a function, after a call of a C function, and at the end of a loop: not between ``open()`` and the body.) If a
``KeyboardInterrupt`` strikes a verb of the store, the lease ends the claim.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

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
    #: A noted soft limit was raised where a body would begin.
    raised_early = False
    #: The task whose run ended last: no soft limit while ``current()``, of the caller, still returns it.
    over: str | None = None

    def __init__(self, current: Callable[[], object] = lambda: None) -> None:
        self._current = current
        self._noted: list[int] = []
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}

    def hold(self, *signals: int) -> None:
        """Hold these signals back from now on. If one strikes meanwhile, this may be called again."""
        for signum in signals:
            handler = signal.getsignal(signum)
            if callable(handler) and handler != self._handle:
                self._handlers[signum] = handler
                signal.signal(signum, self._handle)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if signum == signal.SIGUSR1 and self.over is not None and self.over == self._current():
            return
        in_protocol = frame is not None and frame.f_globals.get("__name__") == _PROTOCOL
        if not self.closed and not in_protocol:
            self._handlers[signum](signum, frame)
            return
        self._noted.append(signum)
        has_last_try, self.ending = self.ending, self.ending or signum == signal.SIGTERM
        if self.waiting and not has_last_try and not in_protocol:
            self.waiting = False
            raise VerbInterruptedError("the store was not waited for: a signal came")

    def open(self) -> None:
        """Let signals strike, noted ones first."""
        self.closed = self.waiting = False
        while self._noted:
            signum = self._noted.pop(0)
            self.raised_early = signum == signal.SIGUSR1
            self._handlers[signum](signum, None)

    def let_exit(self) -> None:
        """Let the process end now if it is to end: its message goes back to the broker."""
        if self.ending:
            self.open()

    def leave(self, *, was_closed: bool, over: str | None = None) -> None:
        """Leave it as it was, and raise the noted signals; a soft time limit not if the task ``over`` has ended."""
        self.waiting = False
        if was_closed:
            return
        self.over, self.closed = over, False
        if self._noted:
            if over is not None:
                self._noted = [signum for signum in self._noted if signum != signal.SIGUSR1]
            self.open()

    @contextmanager
    def around_eager_call(self) -> Iterator[None]:
        """Raise in the caller what comes around the body of the call: Celery would take it for the call's failure."""
        was_closed, over = self.closed, self.over
        self.closed, self.raised_early = True, False
        try:
            yield
        finally:
            if self.raised_early:
                self._noted.append(signal.SIGUSR1)
            self.leave(was_closed=was_closed, over=over)

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


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=shields.clear)
