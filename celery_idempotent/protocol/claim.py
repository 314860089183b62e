"""The claim of a run, as the body of a task or a view sees it."""

from __future__ import annotations

import enum
import hashlib
import time
import uuid
from collections.abc import Callable
from contextlib import nullcontext
from contextvars import ContextVar
from functools import partial
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar

from celery_idempotent import backoff
from celery_idempotent.errors import LeaseLost
from celery_idempotent.records import Identity, Record, Renewal, Stored

if TYPE_CHECKING:
    from celery_idempotent.protocol.options import Policy
    from celery_idempotent.stores.base import Store, Transaction

P = ParamSpec("P")
T = TypeVar("T")


class Phase(enum.Enum):
    """The progress of a run as its worker knows it; the store decides by the token."""

    CLAIMING = "the key is not ours yet"
    RUNNING = "the body is running, and the heartbeat renews the lease"
    UNGUARDED = "the body is running without a claim"
    RELEASED = "the key was given back; what the body may still return is not recorded"
    AWAITS_COMMIT = "the run is over, and is settled after the caller's transaction commits"
    SETTLING = "the run is over, and the heartbeat writes its end state"
    SETTLED = "the end state is written"
    ENDED = "the run is over without an end state: the store did not take it, or none was due"
    AGAIN = "the run is dropped, for a newer claim, or rolled back: the call claims again"


current_run: ContextVar[Claim | None] = ContextVar("idempotency_run", default=None)


def current_claim() -> Claim | None:
    """Return the claim of the run in progress, or ``None`` outside an idempotent run."""
    run, running = current_run.get(), (Phase.RUNNING, Phase.UNGUARDED, Phase.RELEASED)
    return run if run is not None and run.phase in running else None


class _Codec(Protocol):
    """Stores values, exceptions and the results of steps; ``None``: settle without it."""

    def dump_value(self, value: Any) -> Stored | None: ...
    def dump_error(self, error: BaseException) -> Stored | None: ...
    def dump_step(self, name: str, value: object) -> Stored: ...
    def load_value(self, stored: Stored) -> object: ...


class Claim:
    """The claim of the run in progress: ``self.idempotency`` in a bound task, :func:`current_claim` anywhere."""

    #: Without a default: Python 3.11 needs three times as long beside a member of an Enum in the class.
    phase: Phase
    #: The store refused a renewal or a step. The heartbeat's thread sets only this and ``renewed_at``.
    lost = False
    #: That of the body (``idempotency_atomic``).
    transaction: Transaction | None = None

    identity: Identity
    policy: Policy
    codec: _Codec
    store: Store
    #: As it was claimed.
    record: Record
    steps: dict[str, Stored]
    #: When the claim, or its last renewal, was sent (``time.monotonic``): it lives for at least a lease from here.
    renewed_at = 0.0

    @property
    def key(self) -> str:
        """The canonical key."""
        return self.identity.key

    @property
    def scope(self) -> str:
        """The canonical scope, empty without one."""
        return self.identity.scope

    @property
    def token(self) -> int:
        """The fencing token, which grows with every claim of this key: a resource can refuse an older one."""
        return self.record.token

    @property
    def crashes(self) -> int:
        """How many earlier runs of this key ended in a crash of their worker."""
        return self.record.crashes

    def renewal(self) -> Renewal:
        """Return the request that renews this claim."""
        lease_ms, keep_ms = self.policy.lease_ms, self.policy.keep_ms
        return Renewal(
            identity=self.identity, token=self.record.token, lease_ms=lease_ms, keep_ms=keep_ms
        )

    def renew(self) -> None:
        """Renew the lease; in mode ``"observe"`` this does nothing.

        Raises:
            LeaseLost: if the claim is gone.
            StoreUnavailable: if the store did not answer before the lease may have run out.
        """
        if self._is_unprotected:
            return
        until = self.renewed_at + self.policy.lease_ms / 1000
        if not backoff.persist(self._try_renew, until=until, longest=1.0):
            raise self._gone()

    def ensure(self) -> None:
        """Check that this run still holds the claim before an irreversible action: the same as :meth:`renew`."""
        self.renew()

    def _try_renew(self) -> bool:
        if self.lost or self.phase is not Phase.RUNNING:
            return False
        if self.transaction is not None:
            return True  # the database's lock holds the key; a renewal would break the settle
        sent = time.monotonic()
        (renewed,) = self.store.renew([self.renewal()])
        if renewed:
            self.renewed_at = sent
        return renewed

    @property
    def _is_unprotected(self) -> bool:
        return self.phase is Phase.UNGUARDED or self.policy.mode == "observe"

    def derived_key(self, name: str) -> str:
        """Return a UUID for one part of the operation, for an outside system; it is the same for every run."""
        identity = self.identity
        parts = (identity.namespace, identity.scope, identity.key, name)
        framed = b"".join(b"%d:%b" % (len(part.encode()), part.encode()) for part in parts)
        return str(uuid.UUID(bytes=hashlib.sha256(framed).digest()[:16]))

    def step(self, name: str, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run one part of the operation once: ``charge = self.idempotency.step("charge", provider.charge, amount)``.

        The result is written to the record, as the serializer makes it (a tuple as a list), and a later run of the key
        gets it without a call. If the process dies before the write, the next run calls ``function`` again: hand
        :meth:`derived_key` to the outside system, so that it recognises the repetition. Names differ within one task.
        In an atomic task ``function`` must not write to the database of its transaction.

        Raises:
            LeaseLost: if the claim is gone: ``function`` was not called, or its effect was not recorded.
            StoreUnavailable: if the store could not be reached for the length of a lease.
            IdempotencyError: if the result cannot be serialized, or is too large.
        """
        if self._is_unprotected:
            done = self.codec.dump_step(name, function(*args, **kwargs))
            return self.codec.load_value(done)  # type: ignore[return-value]  # what the serializer makes of a T
        if name not in self.steps:
            if self.lost or self.phase is not Phase.RUNNING:
                raise self._gone()
            with nullcontext() if self.transaction is None else self.transaction.read_only():
                result = function(*args, **kwargs)
            done = self.codec.dump_step(name, result)
            checkpoint = self.store.checkpoint
            write = partial(checkpoint, self.identity, token=self.token, name=name, value=done)
            until = time.monotonic() + self.policy.lease_ms / 1000
            if not backoff.persist(write, until=until, longest=1.0):
                raise self._gone()
            self.steps[name] = done
        return self.codec.load_value(self.steps[name])  # type: ignore[return-value]  # as above

    def _gone(self) -> LeaseLost:
        self.lost = True
        return LeaseLost(
            f"The claim of {self.identity} (token {self.token}) is gone: its lease ran out and the key was claimed or "
            "swept, an operator took it, or the run gave it back for a retry. Stop before the next irreversible action."
        )
