"""Keeping claims alive: one thread per process renews the leases of all of them.

With a lease of 60 seconds::

     0 s   claim               the lease ends at  60 s
    20 s   renew               the lease ends at  80 s
    40 s   renew: no answer    the lease ends at  80 s: there are 40 seconds left to try again
    41 s   renew               the lease ends at 101 s

A store that does not answer says nothing about the claim, so the renewal is repeated. A store that refuses does: a
newer claim has the key, a sweep or an operator took it, or the record is gone. The claim becomes LOST. Its run goes on,
because a thread cannot be stopped from outside; its result is stored only if there is no newer claim.
"""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import time
import weakref
from collections import defaultdict
from contextlib import suppress
from typing import TYPE_CHECKING

from celery_idempotent.errors import IdempotencyError
from celery_idempotent.events import counters
from celery_idempotent.protocol.claim import Claim, Phase

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store

logger = logging.getLogger(__name__)

#: A renewal that could not reach the store is tried again after this many seconds at the latest.
RETRY_AFTER = 1.0

#: The thread looks around at least so often, in seconds: it also writes what the process counted.
TICK = 5.0

#: The thread ends when it has had nothing to do for so many seconds.
LINGER = 10.0

#: A worker or a process that ends waits so long for the last counts to be written, in seconds.
EXIT_TIMEOUT = 2.0


class Heartbeat:
    """Renews every claim of this process at a third of its lease, from one daemon thread.

    The thread starts with the first claim. It looks at the claims whenever a third of the shortest lease seen so far
    has passed, and at least every ``TICK`` seconds; a later claim wakes it only if that must be renewed earlier. So a
    task shorter than a third of its lease costs no renewal. The thread also writes what the process counted, and a
    publisher has it for that alone. It ends when there was nothing to do for a while, or when :meth:`finish` asks for
    that, and starts again with the next claim. A forked child starts anew, without the parent's claims.

    A time limit is an exception raised at any instruction of Python code, also inside ``threading.Condition`` or
    ``Thread.start``, which then leave their locks taken. So what a run calls here uses only locks and functions written
    in C, and no :class:`threading.Thread`. A run may also end without calling :meth:`remove`: so the heartbeat has weak
    references only, and does not renew a claim whose run is gone. The thread is not in ``threading.enumerate()``, where
    test suites look for threads that a test left behind: it ends by itself.

    The thread sleeps on a lock, its bell, and to wake it is to release that. Where gevent or eventlet has patched
    ``threading`` the thread is a greenlet, which renews while the runs let it: its bell must then be a lock of theirs,
    or it would wait with the whole process. So the bell is made with the thread, however early this module was
    imported; and under the other lock nothing is done that could switch greenlets.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = _thread.allocate_lock()
        self._bell = _thread.allocate_lock()  # free: rung
        self._due: dict[weakref.ref[Claim], float] = {}
        self._started = counters.has_writer = False
        self._used = False
        self._finishing: list[_thread.LockType] = []
        self._tick = float("inf")
        self._next = float("inf")

    def add(self, claim: Claim) -> None:
        """Keep ``claim`` alive until :meth:`remove`."""
        interval = claim.policy.lease_ms / 3000
        due = claim.renewed_at + interval
        with self._lock:
            self._used = True
            self._due[weakref.ref(claim)] = due
            self._tick = min(self._tick, interval)
            if not self._started:
                self._start()
            early = due < self._next
        if early:
            self._ring()

    def start(self) -> None:
        """Let the thread work though there is nothing to renew: something was counted."""
        with self._lock:
            if not self._started:
                self._start()

    def finish(self) -> None:
        """Let the thread write what was counted and end, unless it has claims to renew; wait for that a little.

        For who ends a worker or the process.
        """
        done = _thread.allocate_lock()
        done.acquire()
        with self._lock:
            if not self._started:
                return
            self._finishing.append(done)
        self._ring()
        done.acquire(timeout=EXIT_TIMEOUT)

    def remove(self, claim: Claim) -> None:
        """Let ``claim`` go; a renewal under way may still end after this."""
        with self._lock:
            self._due.pop(weakref.ref(claim), None)

    def _start(self) -> None:
        self._bell = _thread.allocate_lock()
        # In this order: if a time limit strikes between these two lines, a process may have two heartbeats, but never
        # none.
        _thread.start_new_thread(self._beat, ())
        self._started = counters.has_writer = True

    def _ring(self) -> None:
        with suppress(RuntimeError):  # rung already
            self._bell.release()

    def _beat(self) -> None:
        """Be the thread: renew what is due, write what was counted, sleep until the next lease is due; then end.

        ::

            look: which leases are due ─ renew them, one call a store ─ write the counters ─ sleep ─┐
              ▲                                                                                     │
              └─ a third of the shortest lease has passed, or the bell: a shorter lease, finish() ◀─┘
        """
        busy_at = time.monotonic()
        over = False
        while not over:
            with self._lock:
                now = time.monotonic()
                due = [known for known, at in self._due.items() if at <= now]
                finishing, self._finishing = self._finishing, []
                if self._due or self._used or not counters.empty:
                    busy_at = now
                self._used = False
            self._renew_all(due)
            if finishing:
                counters.write()
            else:
                counters.beat()
            over = self._ends(bool(finishing), idle_s=time.monotonic() - busy_at)
            for done in finishing:
                done.release()
            if not over and (left := self._next - time.monotonic()) > 0:
                self._bell.acquire(timeout=left)

    def _ends(self, asked: bool, *, idle_s: float) -> bool:
        """Is the thread to end? Then the next claim starts another; else note when it is to look around again."""
        with self._lock:
            # Before the last look at the counts. Another thread counts first and then reads _started: so either this
            # one sees the count, or that one sees that it must start a heartbeat.
            self._started = counters.has_writer = False
            wanted = asked or (idle_s >= LINGER and counters.empty)
            if wanted and not self._due and not self._finishing:
                self._tick = self._next = float("inf")
                return True
            self._started = counters.has_writer = True
            soonest = min(self._due.values(), default=float("inf"))
            self._next = min(soonest, time.monotonic() + min(self._tick, TICK))
            return False

    def _renew_all(self, due: list[weakref.ref[Claim]]) -> None:
        by_store: dict[Store, list[Claim]] = defaultdict(list)
        for known in due:
            claim = known()
            if claim is not None and claim.phase is Phase.RUNNING and not claim.lost:
                by_store[claim.store].append(claim)
            else:
                with self._lock:
                    self._due.pop(known, None)
        for store, claims in by_store.items():
            self._renew(store, claims)

    def _renew(self, store: Store, claims: list[Claim]) -> None:
        """Renew ``claims``; whatever goes wrong, the thread lives on."""
        alive: list[bool] | None = None
        sent = time.monotonic()
        try:
            alive = store.renew([claim.renewal() for claim in claims])
        except IdempotencyError as error:
            logger.warning("idempotency: could not renew %d claims: %s", len(claims), error)
        except Exception:
            logger.exception("idempotency: could not renew %d claims", len(claims))
        for claim in self._renewed(claims, alive, sent):
            logger.warning(
                "idempotency: the claim of %s (token %d) is lost before it is settled",
                claim.identity,
                claim.token,
            )

    def _renewed(self, claims: list[Claim], alive: list[bool] | None, sent: float) -> list[Claim]:
        """Note when each is due again; return those that are lost."""
        lost = []
        with self._lock:
            for index, claim in enumerate(claims):
                known = weakref.ref(claim)
                if known not in self._due:
                    continue
                interval = claim.policy.lease_ms / 3000
                if alive is None:
                    self._due[known] = time.monotonic() + min(interval / 3, RETRY_AFTER)
                elif alive[index]:
                    claim.renewed_at = sent
                    self._due[known] = sent + interval
                else:
                    claim.lost = True
                    del self._due[known]
                    lost.append(claim)
        return lost


#: The heartbeat of this process.
heartbeat = Heartbeat()
counters.start_writer = heartbeat.start
# A daemon thread lives until all atexit functions have returned; no new thread can be started at that time.
atexit.register(heartbeat.finish)
