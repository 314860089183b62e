"""One call on its way through the protocol: what a run is given, and what can come of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from celery_idempotent.errors import IdempotencyError, StoreMisconfigured, StoreUnavailable
from celery_idempotent.protocol.claim import StepCodec
from celery_idempotent.records import Identity, Record, Stored

if TYPE_CHECKING:
    from celery_idempotent.identity.identified import Identified
    from celery_idempotent.protocol.deferred import OnCommit
    from celery_idempotent.stores.base import Store

__all__ = [
    "STORE_ERRORS",
    "Call",
    "Codec",
    "Conflict",
    "Ran",
    "Replay",
    "Result",
    "StoreFailed",
    "worker_name",
]

STORE_ERRORS = (StoreUnavailable, StoreMisconfigured)

_HOST = socket.gethostname()
#: Tells this process, and all that it forks, from those of another machine with the same name and the same pids: two
#: containers, say. A worker's children get it from its main process, which thus knows how they name themselves.
_ORIGIN = os.urandom(4).hex()


def worker_name(pid: int) -> str:
    """Return how records name this process, or a child that it forked: ``hostname:pid/id``."""
    return f"{_HOST}:{pid}/{_ORIGIN}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One delivery of one call: what it is about, and who works on it.

    ``longest_wait_ms`` bounds how long the policy ``"wait"`` may hold its worker. ``on_settled`` is told the token of a
    settle by this call. ``message`` is what a sweep publishes should the claim go stale. ``is_failure`` says which
    exceptions, beside the policy's permanent errors, end the operation for whoever asks for its outcome: they settle
    FAILED. ``on_late_error`` makes of an exception that comes after the body, from the end of its transaction, what the
    task would have made of it in there: a retry perhaps. ``unanswered`` are the attempts to claim of earlier rounds of
    the message that no store answered. ``around`` tells which transactions of the caller the run is part of, and its
    record is not: the end waits for them. ``before`` is what the call was about before a deploy that changed its key.
    """

    identity: Identity
    fingerprint: bytes | None
    task_id: str
    worker: str
    longest_wait_ms: int | None = None
    on_settled: Callable[[int], None] | None = None
    message: bytes | None = field(default=None, repr=False)  # has arguments
    is_failure: Callable[[BaseException], bool] | None = None
    on_late_error: Callable[[Exception], Exception] | None = None
    around: Callable[[Store], Sequence[OnCommit]] | None = None
    unanswered: tuple[bytes, ...] = ()
    before: Identified | None = None

    def fails(self, error: BaseException) -> bool:
        """Does this exception settle the record as FAILED?"""
        return self.is_failure is not None and self.is_failure(error)

    def late_error(self, error: Exception) -> Exception:
        """Return what is raised for an exception that came after the body; one of ours is what it is."""
        if self.on_late_error is None or isinstance(error, IdempotencyError):
            return error
        return self.on_late_error(error)


class Codec(StepCodec, Protocol):
    """How values and exceptions are stored; ``None`` means: settle without it."""

    def dump_value(self, value: Any) -> Stored | None:
        """Serialize a result."""
        ...

    def dump_error(self, error: BaseException) -> Stored | None:
        """Serialize an exception."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """The body ran, and its result is recorded (or could not be: then somebody was told)."""

    value: Any


@dataclass(frozen=True, slots=True)
class Replay:
    """The record answers; it was settled ``age_ms`` ago."""

    record: Record
    age_ms: int


@dataclass(frozen=True, slots=True)
class Conflict:
    """Somebody else is at it, for ``left_ms`` more unless the lease is renewed.

    ``other``: at another operation, which shares the key that this one had before a deploy.
    """

    record: Record
    left_ms: int
    other: bool = False


@dataclass(frozen=True, slots=True)
class StoreFailed:
    """The store could not be asked, or cannot be used: nothing ran.

    ``attempt`` is the claim that was not answered, if it came to one: the store may have it all the same.
    ``condemned``: it had said already that this call is not to run, protected or not.
    """

    error: StoreUnavailable | StoreMisconfigured
    attempt: bytes = b""
    condemned: bool = False


Result = Ran | Replay | Conflict | StoreFailed
