"""What a store has about a key."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from typing import Literal, get_args

#: A fingerprint is the first 16 bytes of a SHA-256: enough that two calls never share one by accident,
#: and half the memory of the whole digest in every record.
FINGERPRINT_BYTES = 16

#: What a sweep does with a stale record: note the crash; fail it for good; send its message again.
OnStale = Literal["interrupt", "fail", "requeue"]

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
_LAST_MS = 253_402_300_799_999


def _when(ms: int) -> datetime:
    """Return a time of the store's clock; no damaged one is beyond the last that there is."""
    return EPOCH + timedelta(milliseconds=min(ms, _LAST_MS))


class State(enum.Enum):
    """Where a key is in its life; a key without a record is unclaimed."""

    # By identity, as members are compared: Enum's own is written in Python, and asked several times a run.
    __hash__ = object.__hash__

    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    INTERRUPTED = "INTERRUPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"

    @property
    def settled(self) -> bool:
        """Is this an end state, answered without another run?"""
        return self in _ENDS

    @property
    def is_failure(self) -> bool:
        """Is this an end state that is answered with an exception?"""
        return self.settled and self is not State.COMPLETED


#: The states that a run settles its record in.
EndState = Literal[State.COMPLETED, State.FAILED]
_ENDS = get_args(EndState)


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Identity:
    """What a record is about: one key, in one scope, in one namespace, all in canonical form (see :mod:`.keys`)."""

    namespace: str
    scope: str = ""
    key: str

    @property
    def by_task_id(self) -> bool:
        """Whether the key is only the task id, which no other call shares."""
        return self.key.startswith("@")

    def __str__(self) -> str:
        scope = f" in scope {self.scope}" if self.scope else ""
        return f"{self.namespace} key {self.key}{scope}"


@dataclass(slots=True, kw_only=True)
class Stored:
    """A serialized value or exception, as kombu's registry wrote it.

    The ``body`` is not in the ``repr``, which ends up in logs and error reports.
    """

    content_type: str
    content_encoding: str
    body: bytes = field(repr=False)


@dataclass(slots=True, kw_only=True)
class Record:
    """What the store has about one key.

    Times are milliseconds since the epoch by the store's clock. ``deadline_ms`` is the end of the lease of a PROCESSING
    record (``None`` otherwise). ``worker`` is ``hostname:pid/id`` while a worker holds the key, and empty once it is
    settled; the id tells machines that share a name apart. ``value`` is the result of a COMPLETED and the exception of
    a FAILED record, or ``None`` when it was not kept. ``replaced`` says that the task ended with ``self.replace``:
    another task carries the task id on; ``delivered`` that the callbacks of the settled task were sent; ``reserved``
    that the key was reserved before its message was published, ``uncommitted`` that this reservation is part of a
    transaction which may still be rolled back; ``swept`` that a sweep ended the claim or settled
    the record: its owner, if it still runs, may go on with its token. ``steps`` are the results of the steps that an
    unfinished run recorded, in their order; ``message`` what to publish when it is requeued.
    ``deadline_ms`` of a QUEUED record is when its message counts as lost.

    ``note`` is who changed the record last as an operator, what they did, and why.
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
    uncommitted: bool = False
    swept: bool = False
    on_stale: OnStale = "interrupt"
    message: bytes | None = field(default=None, repr=False)  # has arguments
    steps: tuple[tuple[str, Stored], ...] = ()
    note: str = ""

    @property
    def owner(self) -> str:
        """Who claimed the key last, for people: ``task_id@hostname:pid/id``.

        Of a settled record the task id alone: the rest would cost Redis 32 to 64 bytes for each, of about 300, and
        there may be a billion. The event ``settled`` has it all (``event.record.owner``).
        """
        return f"{self.task_id}@{self.worker}" if self.worker else self.task_id

    @property
    def settled_by_operator(self) -> bool:
        """Did an operator settle this record, not a run or a sweep?"""
        return self.state.settled and self.note.startswith(("complete by ", "fail by "))

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
