"""The values that go through the protocol: a call, and what a run ends with."""

from __future__ import annotations

import os
import socket
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from celery_idempotent.errors import IdempotencyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.claim import StepCodec
from celery_idempotent.records import EndState, Identity, Record, ResultWrite, Stored

if TYPE_CHECKING:
    from celery_idempotent.stores.base import Store

T = TypeVar("T")

#: What a call runs.
Body = Callable[[], object]

#: The ``on_commit`` of one open transaction: ``on_commit(hook)`` has Django call ``hook()`` after the COMMIT.
OnCommit = Callable[[Callable[[], None]], None]

STORE_ERRORS = (StoreUnavailable, StoreMisconfigured)

_HOST = socket.gethostname()
#: Tells this process, and all that it forks, from those of another machine with the same name and the same pids: two
#: containers, say. A worker's children get it from its main process, which thus knows how they name themselves.
_ORIGIN = os.urandom(4).hex()


def worker_name(pid: int) -> str:
    """Return how records name this process, or a child that it forked: ``hostname:pid/id``."""
    return f"{_HOST}:{pid}/{_ORIGIN}"


class OutcomeResult(Protocol):
    """What a body returns, as the caller stores it elsewhere: in a result backend."""

    def write_for(self, store: Store, value: Stored | None) -> ResultWrite | None:
        """Return what this store is to write together with the record; ``None``: the caller writes it, afterwards."""
        ...

    def note_written(self) -> None:
        """Note that it is written, so that the caller does not write it again."""
        ...


@dataclass(slots=True, kw_only=True)
class Call:
    """One delivery of one call: what it is about, and who works on it."""

    identity: Identity
    fingerprint: bytes | None
    task_id: str
    worker: str
    #: Bounds how long the policy ``"wait"`` may hold its worker.
    longest_wait_ms: int | None = None
    #: When the caller's hard time limit has ended this call (``time.monotonic``), less a margin.
    ends_at: float = float("inf")
    #: Called with the token once this call has settled its record.
    on_settled: Callable[[int, EndState], None] | None = None
    #: The result, as the caller stores it elsewhere.
    result: OutcomeResult | None = None
    #: What a sweep publishes should the claim go stale.
    message: bytes | None = field(default=None, repr=False)  # has arguments
    #: Exceptions by which a body says what becomes of its message, a retry for instance: none of them settles FAILED.
    control: tuple[type[Exception], ...] = ()
    #: Does any other exception settle FAILED, and not only a permanent error? The outcome is asked for.
    keep_failure: bool = False
    #: Makes of an exception that comes after the body, from the end of its transaction, what the task would have made
    #: of it: a retry perhaps.
    on_late_error: Callable[[Exception], Exception] | None = None
    #: Returns the ``on_commit`` of each transaction that the caller has open, none if the record is part of one: an
    #: eager run is settled after their COMMIT.
    open_transactions: Callable[[Store], Sequence[OnCommit]] | None = None

    def fails(self, error: BaseException) -> bool:
        """Is this an error of the body, rather than what becomes of its message, or the end of the process?"""
        return isinstance(error, Exception) and not isinstance(error, self.control)

    def late_error(self, error: Exception) -> Exception:
        """Return what is raised for an exception that came after the body; one of ours is what it is."""
        if self.on_late_error is None or isinstance(error, IdempotencyError):
            return error
        return self.on_late_error(error)


class Codec(StepCodec, Protocol):
    """How values and exceptions are stored; ``None`` means: settle without it."""

    def dump_value(self, value: Any) -> Stored | None:  # each codec takes its own kind of result
        """Serialize a result."""
        ...

    def dump_error(self, error: BaseException) -> Stored | None:
        """Serialize an exception."""
        ...


class BodyOutcome(defaultdict[None, T]):
    """What a body returned, once it did: ``outcome = BodyOutcome(body)``, then :meth:`run`.

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


@dataclass(slots=True)
class Ran:
    """The body ran, and its result is recorded (or could not be: that was reported)."""

    value: object


@dataclass(slots=True)
class Replay:
    """The record answers; it was settled ``age_ms`` ago."""

    record: Record
    age_ms: int


@dataclass(slots=True)
class Conflict:
    """Another run holds the key, for ``left_ms`` more unless it renews its lease."""

    record: Record
    left_ms: int


@dataclass(slots=True)
class StoreFailed:
    """The store did not answer, or cannot be used. Nothing ran; or an atomic run was rolled back, or is in doubt.

    ``barred``: the record says that this call must not run, with or without protection (too many crashes).
    ``begun``: it is an atomic run that failed.
    """

    error: StoreUnavailable | StoreMisconfigured
    barred: bool = False
    begun: bool = False


CallResult = Ran | Replay | Conflict | StoreFailed
