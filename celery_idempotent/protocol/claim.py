"""The claim of a run: what the body of a task can read of it and do with it."""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, ParamSpec, Protocol, TypeVar

from celery_idempotent import backoff
from celery_idempotent.errors import IdempotencyError, LeaseLost, StoreUnavailable
from celery_idempotent.records import Record, Renewal, Stored

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store, Transaction

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

#: The longest pause between two tries while the body waits for the store, in seconds.
_LONGEST_PAUSE = 1.0

claim_var: ContextVar[Claim | None] = ContextVar("idempotency_claim", default=None)

#: The most bytes that one step may return, and all steps of a record. In a statement of SQL bytes may take twice as
#: much, and MariaDB accepts 16 MiB by default.
STEP_BYTES = 1024 * 1024
STEPS_BYTES = 6 * STEP_BYTES


class Phase(Enum):
    """Where a claim is in its life, as far as its worker knows. The store decides: each write names the token.

    ::

        claim ─▶ RUNNING ─┬─ the end state is written ──────────────────────────────────────────────────▶ SETTLED
                          ├─ the settle waits for the caller's COMMIT ─▶ AWAITS_COMMIT ─┬─ COMMIT ──────▶ SETTLED
                          │                                                             └─ ROLLBACK: the lease ends it
                          ├─ a retry, or a failure that is not recorded ─▶ RELEASED ── the run is over ─▶ ENDED
                          ├─ the settle is refused: a newer claim has the key ──────────────────────────▶ ENDED
                          ├─ the store is away: nothing is written, and the lease frees the key ────────▶ ENDED
                          └─ the store refused a renewal or a step ─▶ LOST ─▶ from there each of the ways above

    LOST may still become SETTLED: a sweep, say, interrupted the claim, and the key was not claimed after that.
    """

    RUNNING = "the body is at work, and the heartbeat renews the lease"
    LOST = "the store refused a renewal or a step; the body may still be at work"
    RELEASED = "the key was given back; what the body may still return is not recorded"
    AWAITS_COMMIT = "the run is over, and is settled after the caller's transaction commits"
    SETTLED = "the end state is written"
    ENDED = "the run is over, and this worker wrote no end state"


#: In one of these phases the body may still be at work.
AT_WORK = (Phase.RUNNING, Phase.LOST, Phase.RELEASED)

#: In one of these phases the end state is written or given up. The phase is assigned first, and the signal that says so
#: is sent after that: a time limit between the two may lose the signal, but nothing is reported twice.
REPORTED = (Phase.SETTLED, Phase.ENDED)


def current_claim() -> Claim | None:
    """Return the claim of the run that this code is part of, or ``None`` outside an idempotent run."""
    claim = claim_var.get()
    return claim if claim is not None and claim.phase in AT_WORK else None


class StepCodec(Protocol):
    """How the result of a step is stored."""

    def dump_step(self, name: str, value: object) -> Stored:
        """Serialize the result of a step, or raise: a step that cannot be recorded protects nothing."""
        ...

    def load_value(self, stored: Stored) -> object:
        """Return a stored value."""
        ...


class Claim:
    """The claim of the run in progress: ``self.idempotency`` in a bound task, :func:`current_claim` anywhere."""

    #: RUNNING is this class attribute, and never assigned to an instance. :meth:`lose`, which the heartbeat's thread
    #: calls, relies on that: it writes LOST only while the instance has no phase, so it overwrites nothing.
    phase = Phase.RUNNING

    #: A newer claim has the key, and the signal ``lease_lost`` was sent.
    superseded = False
    #: When the settle began (``time.monotonic``), for the duration in its report; ``None`` before, and for a claim
    #: that is settled without a run.
    settling_since: float | None = None
    #: The body replaced its task by another one (``self.replace``), which has its task id.
    replaced = False
    #: Does the record become QUEUED when it is released for a retry? Not without a message, unless it was reserved.
    requeues = False
    #: The transaction that the body is running in (``idempotency_atomic``).
    transaction: Transaction | None = None
    #: Called after the rollback of that transaction: releases the key and, if the run is not eager, publishes a retry.
    after_rollback: Callable[[], object] | None = None

    def __init__(
        self, store: Store, record: Record, renewal: Renewal, codec: StepCodec, *, sent: float
    ) -> None:
        #: Where the record is.
        self.store = store
        #: The record as it was when the key was claimed.
        self.record = record
        #: What it takes to renew this claim.
        self.renewal = renewal
        self._codec = codec
        self._steps = dict(record.steps)
        #: When the claim, or its last renewal, was sent (``time.monotonic``): the store got it later, so the claim
        #: surely lives for one lease from here.
        self.renewed_at = sent

    def __repr__(self) -> str:
        return f"<Claim of {self.record.identity}, token {self.token}>"

    @property
    def key(self) -> str:
        """The canonical key, the same for every run of the operation."""
        return self.record.identity.key

    @property
    def scope(self) -> str:
        """The canonical scope, empty without one."""
        return self.record.identity.scope

    @property
    def token(self) -> int:
        """The fencing token: it grows with every claim of this key, so that a resource can refuse an older one."""
        return self.record.token

    @property
    def has_steps(self) -> bool:
        """Did this run, or an earlier one, record a step?"""
        return bool(self._steps)

    @property
    def crashes(self) -> int:
        """How many earlier runs of this key ended in a crash of their worker."""
        return self.record.crashes

    def prepare_renewal(self) -> bool:
        """Return whether there is a lease to renew: not for a run that lost its key or gave it back."""
        return self.phase is Phase.RUNNING

    def lose(self) -> None:
        """RUNNING becomes LOST: the store refused a renewal or a step. Every other phase stays what it is.

        The heartbeat calls this in its own thread, and must not overwrite what the run has written meanwhile. It needs
        no lock for that: ``setdefault`` on the instance's dict checks and writes in one step, and so writes LOST only
        if the run has assigned no phase::

            run         ─────────── release: RELEASED ─ the retry is published ────────
            heartbeat   ─ renew: refused ─────────────────────────── lose(): no effect
        """
        vars(self).setdefault("phase", Phase.LOST)

    def renew(self) -> None:
        """Renew the lease. A store that does not answer is asked again, until the lease may have run out.

        Raises:
            LeaseLost: if the claim is gone.
            StoreUnavailable: if the store did not answer before the lease may have run out.
        """
        lease_s = self.renewal.lease_ms / 1000
        failures = 0
        while True:
            try:
                renewed = self._try_renew()
                break
            except StoreUnavailable:
                failures += 1
                # Asked each time: the heartbeat may have renewed it meanwhile.
                until = self.renewed_at + lease_s
                if not backoff.pause(failures, until=until, longest=_LONGEST_PAUSE):
                    raise
        if not renewed:
            raise self._gone()

    def _try_renew(self) -> bool:
        if self.phase is not Phase.RUNNING:
            return False
        sent = time.monotonic()
        (renewed,) = self.store.renew([self.renewal])
        if renewed:
            self.renewed_at = sent
        return renewed

    def ensure(self) -> None:
        """Check that this run still holds the claim, before an irreversible action. The same as :meth:`renew`.

        Raises:
            LeaseLost: if the claim is gone.
            StoreUnavailable: if the store did not answer before the lease may have run out.
        """
        self.renew()

    def derived_key(self, name: str) -> str:
        """Return a key for one part of the operation, to hand to an outside system: a UUID, the same for every run."""
        identity = self.record.identity
        parts = (identity.namespace, identity.scope, identity.key, name)
        framed = b"".join(b"%d:%b" % (len(part.encode()), part.encode()) for part in parts)
        return str(uuid.UUID(bytes=hashlib.sha256(framed).digest()[:16]))

    def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one part of the operation once: ``charge = self.idempotency.step("charge", provider.charge, amount)``.

        Its result is written to the record before this returns. A later run of the same key (a retry, another attempt
        after a failure or a crash) gets that result back, and ``function`` is not called again. If the process dies
        after ``function`` returned and before its result is written, the next run calls it again: hand
        :meth:`derived_key` to the outside system, so that it recognises the repetition.

        The result comes back as the serializer makes it (a tuple as a list), the first time, too. Steps of one task
        have different names. In an atomic task ``function`` must not write to the database of its transaction: a
        failure would roll that back, while the step stays recorded, and is not called again.

        Raises:
            LeaseLost: if the claim is gone. If that was known before, ``function`` was not called; else what it did
                was not recorded.
            StoreUnavailable: if the store could not be reached for the length of a lease.
            IdempotencyError: if the result cannot be serialized, or is too large; or, before ``function`` is called,
                if the results of earlier steps leave no room for another one.
        """
        known = self._steps.get(name)
        if known is None:
            if self.phase is not Phase.RUNNING:
                raise self._gone()
            if sum(len(step.body) for step in self._steps.values()) > STEPS_BYTES - STEP_BYTES:
                raise IdempotencyError(
                    f"Step {name!r} of {self.record.identity} is not begun: the results of the steps before it leave "
                    f"too little of the {STEPS_BYTES:,} bytes that a record keeps of all steps. Return less from "
                    "them: an id, instead of what it stands for."
                )
            with nullcontext() if self.transaction is None else self.transaction.outside():
                done = function(*args, **kwargs)
            known = self._codec.dump_step(name, done)
            self._checkpoint(name, known)
            self._steps[name] = known
        return self._codec.load_value(known)  # type: ignore[return-value]  # what the serializer makes of a T

    def _checkpoint(self, name: str, value: Stored) -> None:
        """Write the step's result; try for up to a lease: the next run repeats a step that was not written."""
        identity, token = self.record.identity, self.token
        write = partial(self.store.checkpoint, identity, token=token, name=name, value=value)
        give_up = time.monotonic() + self.renewal.lease_ms / 1000
        if not backoff.persist(write, until=give_up, longest=_LONGEST_PAUSE):
            raise self._gone()

    def _gone(self) -> LeaseLost:
        self.lose()
        return LeaseLost(
            f"The claim of {self.record.identity} (token {self.token}) is gone: its lease ran out and the key "
            "was claimed or swept, an operator took it, or the run itself gave it back for a retry. Stop before the "
            "next irreversible action."
        )


class ObservedClaim(Claim):
    """The claim of a run in observe mode: its steps run each time, and it goes on without its claim."""

    def renew(self) -> None:
        """Renew the lease, if the store lets it; a warning says so if not."""
        try:
            if not self._try_renew():
                self.lose()
        except IdempotencyError as error:
            logger.warning(
                "idempotency: observing: could not renew %s: %s", self.record.identity, error
            )

    def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Call ``function``, and return its result as a recorded one would come back."""
        value = self._codec.dump_step(name, function(*args, **kwargs))
        return self._codec.load_value(value)  # type: ignore[return-value]  # as in a guarded step


class UnguardedClaim(ObservedClaim):
    """The claim of a run without protection: it holds no key, and renews nothing."""

    def renew(self) -> None:
        """Do nothing: there is no lease."""
