"""What a store has about a key and how it answers a claim: frozen values, no I/O, no clock."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Literal

__all__ = [
    "FINGERPRINT_BYTES",
    "Answer",
    "ClaimRequest",
    "Claimed",
    "Counted",
    "EndState",
    "Held",
    "Identity",
    "Mismatched",
    "OnStale",
    "Page",
    "Record",
    "Refusal",
    "RefusalKind",
    "Renewal",
    "Reservation",
    "Reserved",
    "Retained",
    "Selection",
    "Settled",
    "State",
    "Stats",
    "Stored",
    "SweepReport",
]

#: A fingerprint is the first 16 bytes of a SHA-256: enough that two calls never share one by accident,
#: and half the memory of the whole digest in every record.
FINGERPRINT_BYTES = 16

#: What a sweep does with a stale record: note the crash; fail it for good; send its message again.
OnStale = Literal["interrupt", "fail", "requeue"]

#: Why a call was refused: another call held the key; its arguments were others.
RefusalKind = Literal["conflict", "mismatch"]

_EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST_MS = 253_402_300_799_999


def _when(ms: int) -> datetime:
    """Return a time of the store's clock; no damaged one is beyond the last that there is."""
    return _EPOCH + timedelta(milliseconds=min(ms, _LAST_MS))


class State(enum.Enum):
    """Where a key is in its life; a key without a record is unclaimed."""

    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    INTERRUPTED = "INTERRUPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"

    @property
    def settled(self) -> bool:
        """Is this an end state, answered without another run?"""
        return self is State.COMPLETED or self is State.FAILED


#: The states that a run settles its record in.
EndState = Literal[State.COMPLETED, State.FAILED]


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a record is about: one key, in one scope, in one namespace, all in canonical form (see :mod:`.keys`)."""

    namespace: str
    scope: str = ""
    key: str

    def __str__(self) -> str:
        scope = f" in scope {self.scope}" if self.scope else ""
        return f"{self.namespace} key {self.key}{scope}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """A serialized value or exception, as kombu's registry wrote it.

    ``compression`` is the content type of its compression, empty without one. The ``body`` is not in the ``repr``,
    which ends up in logs and error reports.
    """

    content_type: str
    content_encoding: str
    body: bytes = field(repr=False)
    compression: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """A call that could not have a key: when, by the store's clock, and under which task id, cut to 100 bytes.

    A call that is refused again and again, with no other in between, is one refusal, with the time of the last.
    """

    kind: RefusalKind
    at_ms: int
    task_id: str = ""

    @property
    def at(self) -> datetime:
        """When it was."""
        return _when(self.at_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What the store has about one key.

    Times are milliseconds since the epoch by the store's clock. ``deadline_ms`` is the end of the lease of a PROCESSING
    record (``None`` otherwise). ``worker`` is ``hostname:pid/id`` while a worker holds the key, and empty once it is
    settled; the id tells machines that share a name apart. ``value`` is the result of a COMPLETED and the exception of
    a FAILED record, or ``None`` when it was not kept. ``replaced`` says that the task ended with ``self.replace``:
    another task carries the task id on; ``delivered`` that the callbacks of the settled task were sent; ``reserved``
    that the key was reserved before its message was published. ``steps`` are the
    results of the steps that an unfinished run recorded, in their order; ``message`` what to publish when it is
    requeued. ``deadline_ms`` of a QUEUED record is when its message counts as lost.

    ``refusals`` are the last five who could not have the key, the latest last. Only ``get`` is sure to bring them, and
    records that differ in nothing else are equal: a refusal changes nothing for the holder of the key.
    """

    identity: Identity
    state: State
    token: int
    created_ms: int
    updated_ms: int
    deadline_ms: int | None = None
    crashes: int = 0
    attempts: int = 1
    fingerprint: bytes | None = None
    task_id: str = ""
    worker: str = ""
    value: Stored | None = None
    replaced: bool = False
    delivered: bool = False
    reserved: bool = False
    on_stale: OnStale = "interrupt"
    message: bytes | None = field(default=None, repr=False)  # has arguments
    steps: tuple[tuple[str, Stored], ...] = ()
    refusals: tuple[Refusal, ...] = field(default=(), compare=False)

    @property
    def owner(self) -> str:
        """Who claimed the key last, for people: ``task_id@hostname:pid/id``.

        Of a settled record the task id alone: the rest would cost Redis 32 to 64 bytes for each, of about 300, and
        there may be a billion. The event ``settled`` has it all (``event.record.owner``).
        """
        return f"{self.task_id}@{self.worker}" if self.worker else self.task_id

    @property
    def created_at(self) -> datetime:
        """When the key was first claimed."""
        return _when(self.created_ms)

    @property
    def updated_at(self) -> datetime:
        """When the record last changed its state."""
        return _when(self.updated_ms)

    @property
    def deadline(self) -> datetime | None:
        """When the lease runs out, for a PROCESSING record."""
        if self.deadline_ms is None:
            return None
        return _when(self.deadline_ms)

    def stale(self, now_ms: int) -> bool:
        """Has the lease of this PROCESSING record run out at ``now_ms`` of the store's clock?"""
        return (
            self.state is State.PROCESSING
            and self.deadline_ms is not None
            and self.deadline_ms <= now_ms
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRequest:
    """What a worker asks a store for: the key, for whom, and for how long.

    ``attempt`` (8 random bytes, new for every claim) lets a claim whose answer was lost be repeated: while that claim
    holds, the same attempt gets the same token again. ``unanswered`` are attempts that were given up without an
    answer, and nothing ran: a record that one of them holds is free, and claiming it counts no crash.

    The lease lasts ``lease_ms``; the record lives ``keep_ms`` longer, so that there is something to sweep and a crash
    to count. ``on_stale`` tells a sweep what to do should the lease run out, ``message`` what to publish then.
    """

    identity: Identity
    attempt: bytes
    lease_ms: int
    keep_ms: int
    fingerprint: bytes | None = None
    task_id: str = ""
    worker: str = ""
    on_stale: OnStale = "interrupt"
    message: bytes | None = field(default=None, repr=False)  # has arguments
    unanswered: tuple[bytes, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Renewal:
    """What its holder needs to renew a claim: identity, token, and for how many milliseconds to renew it."""

    identity: Identity
    token: int
    lease_ms: int
    keep_ms: int


@dataclass(frozen=True, slots=True)
class Claimed:
    """The caller has the key now: run."""

    record: Record


@dataclass(frozen=True, slots=True)
class Held:
    """Another live claim holds the key for ``left_ms`` more milliseconds, unless it is renewed."""

    record: Record
    left_ms: int


@dataclass(frozen=True, slots=True)
class Settled:
    """The operation is done: replay. ``age_ms`` says for how long, by the store's clock."""

    record: Record
    age_ms: int


@dataclass(frozen=True, slots=True)
class Retained:
    """A committed end: settled ``age_ms`` ago, and kept for ``left_ms`` more, by the store's clock."""

    record: Record
    age_ms: int
    left_ms: int


@dataclass(frozen=True, slots=True)
class Mismatched:
    """The key belongs to a call with another fingerprint: refuse."""

    record: Record


@dataclass(frozen=True, slots=True)
class Reserved:
    """The key waits for the message that we are about to publish, under the record's task id."""

    record: Record


#: What a reservation can answer.
Reservation = Reserved | Held | Settled | Mismatched

#: What a claim can answer.
Answer = Claimed | Held | Settled | Mismatched


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What one sweep did, with the records as they are now.

    ``requeued`` are QUEUED, and their messages are to be published now, before their deadlines. ``more`` says that
    its limit left more to do.
    """

    interrupted: tuple[Record, ...] = ()
    requeued: tuple[Record, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which records to list: those of which all that is given is true.

    ``states`` (none: any), ``namespace`` and ``scope`` in canonical form, ``stale``: PROCESSING with a lease that ran
    out, ``created_before_ms``: by the store's clock.
    """

    states: frozenset[State] = frozenset()
    namespace: str | None = None
    scope: str | None = None
    stale: bool = False
    created_before_ms: int | None = None

    @property
    def wanted(self) -> frozenset[State]:
        """The states that a record may be in."""
        if self.stale:
            return frozenset({State.PROCESSING})
        return self.states or frozenset(State)

    @property
    def newest_first(self) -> bool:
        """Are only INTERRUPTED or only FAILED records wanted? Of these every store lists the newest first."""
        return self.wanted in ({State.INTERRUPTED}, {State.FAILED})

    def includes(self, record: Record, now_ms: int) -> bool:
        """Is this one of them, at ``now_ms`` of the store's clock?"""
        identity = record.identity
        return (
            record.state in self.wanted
            and (self.namespace is None or identity.namespace == self.namespace)
            and (self.scope is None or identity.scope == self.scope)
            and (not self.stale or record.stale(now_ms))
            and (self.created_before_ms is None or record.created_ms < self.created_before_ms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list: records without their values, steps and messages, as of ``now_ms`` of the store's clock.

    ``cursor`` asks for what follows and is empty at the end; ``looked_at`` is how many keys this page took.
    """

    records: tuple[Record, ...]
    cursor: str = ""
    looked_at: int
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How many records there are that are not completed, as of ``now_ms`` of the store's clock.

    ``live`` are PROCESSING and QUEUED ones within their lease or deadline, ``stale`` those past it, ``interrupted`` and
    ``failed`` those in these states. ``at_least`` names those of which there may be more, because no store counts for
    longer than is good. ``swept_ms`` is when the last sweep ended, ``None`` if none did or the store does not note it.
    """

    live: int
    stale: int
    failed: int
    now_ms: int
    interrupted: int = 0
    swept_ms: int | None = None
    at_least: frozenset[str] = frozenset()

    @property
    def swept_at(self) -> datetime | None:
        """When the last sweep ended."""
        return None if self.swept_ms is None else _EPOCH + timedelta(milliseconds=self.swept_ms)

    def said(self, name: Literal["live", "stale", "interrupted", "failed"]) -> str:
        """Return a count for people, with a plus where there may be more."""
        plus = "+" if name in self.at_least else ""
        return f"{getattr(self, name):,}{plus}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How often something happened to a task within one hour; ``hour`` counts from the epoch, by the store's clock."""

    hour: int
    task: str
    outcome: str
    count: int

    @property
    def at(self) -> datetime:
        """When the hour began."""
        return _EPOCH + timedelta(hours=self.hour)
