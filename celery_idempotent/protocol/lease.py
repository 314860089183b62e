"""Keeping claims alive: one thread per process renews the leases of all of them.

With a lease of 60 seconds::

     0 s   claim               the lease ends at  60 s
    20 s   renew               the lease ends at  80 s
    40 s   renew: no answer    the lease ends at  80 s: there are 40 seconds left to try again
    41 s   renew               the lease ends at 101 s

A refused renewal means that the claim is lost: the key has a newer one, or no record. Its run goes on, because a thread
cannot be stopped from outside; its result is stored only if there is no newer claim.

The thread also undoes requests that were given up without an answer, and that the store may carry out later::

    claim ── no answer for 3 s: given up, the message comes back ── the store thaws, and carries it out
                   └──▶ take it back: no answer · no answer ───────▶ done ──▶ look again, the command may be late
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.errors import IdempotencyError, StoreUnavailable
from celery_idempotent.protocol.claim import Claim, Phase
from celery_idempotent.signals import counters

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: The longest sleep of the thread, which writes the counts of the process, in seconds.
TICK = 5.0

#: How often a request is undone once the store answers, within a minute: the command may be as late as TCP sends lost
#: packets again, after pauses that double.
_LOOKS = 8
#: The longest wait for that, and for the last counts alone, at the end of a process.
_LAST_UNDO, _LAST_COUNTS = 10.0, 2.0
#: The most requests that are remembered; the lease or the deadline ends the others.
_MOST = 1000

_NEVER = float("inf")
_RENEWED = (Phase.RUNNING, Phase.SETTLING)


@dataclass(slots=True, eq=False)
class _GivenUp:
    """A request without an answer; ``undo`` may be called any number of times."""

    undo: Callable[[], object]
    due: float = 0.0
    answers: int = 0


class Heartbeat:
    """Renews every claim of this process at a third of its lease, from one daemon thread.

    A run wakes the thread only if its renewal is due before the thread would look: a task shorter than a third of its
    lease costs no renewal and no wake-up. No lock is needed, because each side writes, then reads::

        run       _due[run] = 20 s ──▶ reads _looks_at
        thread    _looks_at = 25 s ──▶ reads _due         one of the two sees the other

    ``_looks_at`` is infinite while the thread is busy or not started. A publisher has the thread for its counts alone.

    Test suites do not find the thread by ``threading.enumerate()``. It sleeps on a lock, its bell. Where gevent or
    eventlet has patched ``threading`` it is a greenlet, and the bell must be theirs: it is made with the thread.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = _thread.allocate_lock()
        self._bell = _thread.allocate_lock()  # free: rung
        self._due: dict[Claim, float] = {}
        self._given_up: deque[_GivenUp] = deque(maxlen=_MOST)
        self._looks_at = _NEVER
        self._started = self._writes_now = counters.has_writer = False

    def add(self, claim: Claim) -> None:
        """Keep ``claim`` alive until :meth:`remove`."""
        self._due[claim] = due = claim.renewed_at + claim.policy.lease_ms / 3000
        if due < self._looks_at:
            self.start()
            self._ring()

    def remove(self, claim: Claim) -> None:
        """Stop renewing ``claim``; a renewal in progress may still end after this."""
        self._due.pop(claim, None)

    def finish_later(self, undo: Callable[[], object]) -> None:
        """Call ``undo`` until the store answers, and for some time after: it may carry out a request late."""
        self._given_up.append(_GivenUp(undo))
        self.start()
        self._ring()

    def start(self) -> None:
        """Start the thread, if there is none."""
        with self._lock:
            if not self._started:
                self._bell = _thread.allocate_lock()
                _thread.start_new_thread(self._beat, ())
                self._started = True
            counters.has_writer = True

    def finish(self) -> None:
        """Have the thread do the last work of a process that ends, and wait for it."""
        if not self._started:
            return
        until = time.monotonic() + (_LAST_UNDO if self._given_up else _LAST_COUNTS)
        self._writes_now = True
        self._ring()
        while time.monotonic() < until and (
            self._writes_now or any(each.answers < 2 for each in self._given_up.copy())
        ):
            time.sleep(0.005)

    def _ring(self) -> None:
        with suppress(RuntimeError):  # rung already
            self._bell.release()

    def _beat(self) -> None:
        """Renew due claims, write the counts, sleep until the next claim is due; this is the thread."""
        while True:
            self._renew_due()
            self._undo_due()
            if self._writes_now:
                counters.write()
                self._writes_now = False
            else:
                counters.beat()
            self._looks_at = until = time.monotonic() + TICK
            undone = [each.due for each in self._given_up.copy()]
            self._looks_at = until = min([until, *undone, *self._due.copy().values()])
            if (left := until - time.monotonic()) > 0:
                self._bell.acquire(timeout=left)
            self._looks_at = _NEVER

    def _renew_due(self) -> None:
        now = time.monotonic()
        by_store: dict[Store, list[Claim]] = defaultdict(list)
        for claim, due in self._due.copy().items():
            if due <= now and claim.phase in _RENEWED and not claim.lost:
                by_store[claim.store].append(claim)
            elif due <= now:
                self.remove(claim)
        for store, claims in by_store.items():
            self._renew(store, claims)

    def _undo_due(self) -> None:
        for each in self._given_up.copy():
            if each.due > time.monotonic():
                continue
            try:
                each.undo()
            except StoreUnavailable:
                # The others would wait as long, and renewals for all of them.
                each.due = time.monotonic() + 0.5
                self._given_up.rotate(-1)
                return
            except Exception as error:  # noqa: BLE001  the thread survives any error
                logger.warning("idempotency: a request without an answer is left alone: %s", error)
                each.answers = _LOOKS
            each.due = time.monotonic() + 0.5 * 2**each.answers
            each.answers += 1
            if each.answers >= _LOOKS:
                self._given_up.remove(each)

    def _renew(self, store: Store, claims: list[Claim]) -> None:
        """Renew ``claims``; the thread survives any error."""
        sent = time.monotonic()
        alive: Sequence[bool | None]
        try:
            alive = store.renew([claim.renewal() for claim in claims])
        except Exception as error:
            expected = isinstance(error, IdempotencyError)
            line = "idempotency: could not renew %d claims: %s"
            logger.warning(line, len(claims), error, exc_info=not expected)
            alive = [None] * len(claims)
        for claim, renewed in zip(claims, alive, strict=True):
            if claim not in self._due:
                continue  # its run has ended meanwhile
            if renewed:
                claim.renewed_at = sent
                self._due[claim] = sent + claim.policy.lease_ms / 3000
            elif renewed is None:
                self._due[claim] = time.monotonic() + min(claim.policy.lease_ms / 9000, 1.0)
            else:
                self.remove(claim)
                claim.lost = True
                line = "idempotency: the claim of %s (token %d) is lost before it is settled"
                logger.warning(line, claim.identity, claim.token)


heartbeat = Heartbeat()
counters.start_writer = heartbeat.start
# A daemon thread lives until all atexit functions have returned; no new thread can be started at that time.
atexit.register(heartbeat.finish)
