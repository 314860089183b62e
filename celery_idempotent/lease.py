"""Keeping claims alive: the claim that a run holds, and the one thread per process that renews all of them."""

from __future__ import annotations

import _thread
import logging
import os
import threading
import time
import weakref
from collections import defaultdict
from contextlib import suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING

from celery_idempotent.errors import IdempotencyError, LeaseLost
from celery_idempotent.records import Lease, Record

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store

__all__ = ["Claim", "Heartbeat", "current_claim", "heartbeat", "running"]

logger = logging.getLogger(__name__)

#: A renewal that could not reach the store is tried again after this many seconds at the latest.
RETRY_AFTER = 1.0

running: ContextVar[Claim | None] = ContextVar("idempotency_claim", default=None)


def current_claim() -> Claim | None:
    """Return the claim of the run that this code is part of, or ``None`` outside an idempotent run."""
    claim = running.get()
    return None if claim is None or claim.over else claim


class Claim:
    """A key that this run holds: what the body of a task may know about it and do with it."""

    __slots__ = (
        "__weakref__",
        "_lease",
        "_record",
        "_store",
        "given_back",
        "lost",
        "over",
        "replaced",
        "settled",
    )

    def __init__(self, store: Store, record: Record, lease: Lease) -> None:
        self._store = store
        self._record = record
        self._lease = lease
        #: The heartbeat found the claim gone.
        self.lost = False
        #: The key was released before the run ended: its retry is on its way, and its result is not to be recorded.
        self.given_back = False
        #: The run hands its task id over to another task (``self.replace``).
        self.replaced = False
        #: The run is over: this claim is nobody's current one, and not to be renewed.
        self.over = False
        #: The end of the run is written.
        self.settled = False

    def __repr__(self) -> str:
        return f"<Claim of {self._record.identity}, token {self.token}>"

    @property
    def record(self) -> Record:
        """The record as it was when the key was claimed."""
        return self._record

    @property
    def lease(self) -> Lease:
        """What it takes to renew this claim."""
        return self._lease

    @property
    def store(self) -> Store:
        """The store that keeps the record."""
        return self._store

    @property
    def key(self) -> str:
        """The canonical key, to hand to a payment provider, say."""
        return self._record.identity.key

    @property
    def scope(self) -> str:
        """The canonical scope, empty without one."""
        return self._record.identity.scope

    @property
    def token(self) -> int:
        """The fencing token: it grows with every claim of this key, so that a resource can refuse an older one."""
        return self._record.token

    @property
    def crashes(self) -> int:
        """How many earlier runs of this key a crash took."""
        return self._record.crashes

    def renew(self) -> None:
        """Let the lease start anew, now.

        Raises:
            LeaseLost: if the claim is gone.
            StoreUnavailable: if the store did not answer.
        """
        if self.lost or not self._store.renew([self._lease])[0]:
            self.lost = True
            raise LeaseLost(
                f"The claim of {self._record.identity} (token {self.token}) is gone: its lease ran out and the key was "
                "claimed or swept, or an operator forgot it. Stop before the next irreversible step."
            )

    def ensure(self) -> None:
        """Make sure, by asking the store, that the claim is still ours: call it before an irreversible step.

        Raises:
            LeaseLost: if the claim is gone.
            StoreUnavailable: if the store did not answer.
        """
        self.renew()


class Heartbeat:
    """Renews every claim of this process at a third of its lease, from one daemon thread.

    The thread starts with the first claim and is not woken by later ones: it looks at the claims whenever the shortest
    lease seen so far could need it, so a task shorter than a third of its lease costs no renewal and no wake-up. A
    forked child starts anew, without the parent's claims.

    A time limit is an exception raised at any instruction of Python code, also inside ``threading.Condition`` or
    ``Thread.start``, which then leave their locks taken. So the run's side uses what is written in C, and nothing else;
    and a claim whose run is gone without a word is not kept alive, for the heartbeat knows it by a weak reference.
    """

    def __init__(self) -> None:
        self._forget()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget)

    def _forget(self) -> None:
        self._lock = threading.Lock()
        self._bell = threading.Lock()  # free: rung
        self._due: dict[weakref.ref[Claim], float] = {}
        self._started = False
        self._tick = float("inf")
        self._next = float("inf")

    def add(self, claim: Claim) -> None:
        """Keep ``claim`` alive until :meth:`remove`."""
        interval = claim.lease.lease_ms / 3000
        due = time.monotonic() + interval
        with self._lock:
            self._due[weakref.ref(claim)] = due
            self._tick = min(self._tick, interval)
            if not self._started:
                # In this order: struck between the two, a process may have two heartbeats, but never none.
                _thread.start_new_thread(self._beat, ())
                self._started = True
            early = due < self._next
        if early:
            with suppress(RuntimeError):  # rung already
                self._bell.release()

    def remove(self, claim: Claim) -> None:
        """Let ``claim`` go; a renewal under way may still end after this."""
        with self._lock:
            self._due.pop(weakref.ref(claim), None)

    def _beat(self) -> None:
        threading.current_thread().name = "idempotency-heartbeat"
        while True:
            with self._lock:
                now = time.monotonic()
                due = [known for known, at in self._due.items() if at <= now]
            self._renew_all(due)
            with self._lock:
                soonest = min(self._due.values(), default=float("inf"))
                self._next = min(soonest, time.monotonic() + self._tick)
            if (left := self._next - time.monotonic()) > 0:
                self._bell.acquire(timeout=left)

    def _renew_all(self, due: list[weakref.ref[Claim]]) -> None:
        by_store: dict[Store, list[Claim]] = defaultdict(list)
        for known in due:
            claim = known()
            if claim is not None and not claim.over:
                by_store[claim.store].append(claim)
            else:
                with self._lock:
                    self._due.pop(known, None)
        for store, claims in by_store.items():
            self._renew(store, claims)

    def _renew(self, store: Store, claims: list[Claim]) -> None:
        """Renew ``claims``; whatever goes wrong, the thread lives on."""
        alive: list[bool] | None = None
        try:
            alive = store.renew([claim.lease for claim in claims])
        except IdempotencyError as error:
            logger.warning("idempotency: could not renew %d claims: %s", len(claims), error)
        except Exception:
            logger.exception("idempotency: could not renew %d claims", len(claims))
        now = time.monotonic()
        with self._lock:
            for index, claim in enumerate(claims):
                known = weakref.ref(claim)
                if known not in self._due:
                    continue
                interval = claim.lease.lease_ms / 3000
                if alive is None:
                    self._due[known] = now + min(interval / 3, RETRY_AFTER)
                elif alive[index]:
                    self._due[known] = now + interval
                else:
                    claim.lost = True
                    del self._due[known]
                    logger.warning(
                        "idempotency: the claim of %s (token %d) is lost while its run goes on",
                        claim.record.identity,
                        claim.token,
                    )


#: The heartbeat of this process.
heartbeat = Heartbeat()
