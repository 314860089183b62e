"""Records, and the questions and answers of a store's verbs: values without I/O and clock."""
# Most are not ``frozen``, which would take three times as long to make; a task makes several, and those by position:
# a call by keywords takes twice as long.

from __future__ import annotations

import enum
import os
from binascii import hexlify
from dataclasses import dataclass, field
from datetime import datetime, timezone
from struct import Struct
from typing import Final, Literal, NamedTuple

#: The namespace of the keys of all guarded views.
HTTP_NAMESPACE: Final = "http"

#: A fingerprint is the first 16 bytes of a SHA-256.
FINGERPRINT_BYTES = 16
#: A repeated claim with the same attempt id gets the same answer.
ATTEMPT_BYTES = 8

#: A sweep of a stale record notes the crash; fails it for good; sends its message again.
OnStale = Literal["interrupt", "fail", "requeue"]


def moment(ms: int) -> datetime:
    """Return a store's time, of a damaged record at most the year 9999."""
    return datetime.fromtimestamp(min(ms, 253_370_764_800_000) / 1000, timezone.utc)


_PARTS_OF_UUID: Final = Struct("8s4s4s4s12s").unpack


def uuid_text(packed: bytes) -> str:
    """Return 16 bytes as a UUID, in a tenth of the time that :mod:`uuid` takes."""
    return b"-".join(_PARTS_OF_UUID(hexlify(packed))).decode()


class PackedId(str):
    """A UUID that knows its bytes: to parse it takes 2 % of a request's instructions."""

    __slots__ = ("packed",)
    packed: bytes


def random_id() -> PackedId:
    """Return a new task id."""
    packed = os.urandom(16)
    made = PackedId(uuid_text(packed))
    made.packed = packed
    return made


class State(enum.Enum):
    """The state of a key; a key without a record is unclaimed."""

    __hash__ = object.__hash__  # Enum's is written in Python, which takes 1 % of a verb

    QUEUED = "QUEUED"
    PROCESSING = "PROCESSING"
    INTERRUPTED = "INTERRUPTED"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"

    @property
    def is_final(self) -> bool:
        """Is this an end state, answered without another run?"""
        return self is State.COMPLETED or self is State.FAILED


EndState = Literal[State.COMPLETED, State.FAILED]


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Identity:
    """One key in one scope in one namespace, in canonical form (see :mod:`.keys`)."""

    namespace: str
    scope: str = ""
    key: str

    @property
    def waiting(self) -> Identity:
        """Where the one call is reserved that waits while another runs (``publish_once="until_start"``)."""
        return Identity(namespace=self.namespace, scope=self.scope, key=f"~{self.key}")

    @property
    def by_task_id(self) -> bool:
        """Is the key only the task id, which no other call shares?"""
        return self.key.startswith("@")

    def __str__(self) -> str:
        scope = f" in scope {self.scope}" if self.scope else ""
        return f"{self.namespace} key {self.key}{scope}"


@dataclass(slots=True)
class Stored:
    """A serialized value or exception, as kombu's registry wrote it."""

    content_type: str
    content_encoding: str
    body: bytes = field(repr=False)  # a repr goes to logs


@dataclass(slots=True)
class Record:
    """The state and history of one key; times are milliseconds since the epoch by the store's clock.

    ``deadline_ms`` is the end of a lease, or the moment from which the message of a QUEUED record is lost. ``worker``
    is ``hostname:pid/id`` until the record is settled. ``replaced``: another task has the task id; ``delivered``: the
    callbacks were sent; ``reserved``: before the publish, in a transaction that may still be rolled back if
    ``uncommitted``; ``swept``: a sweep ended the claim or settled the record, and its owner may go on with its token.
    ``message`` is published when the key is requeued. ``note`` is the last operation of a person, by whom, and why.
    ``copies``: ids of this task and of earlier ones whose messages were sent more than once. ``error``: of FAILED, as
    "class: message".
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
    on_stale: OnStale = "interrupt"
    message: bytes | None = field(default=None, repr=False)  # has arguments
    value: Stored | None = None
    replaced: bool = False
    delivered: bool = False
    reserved: bool = False
    uncommitted: bool = False
    swept: bool = False
    steps: tuple[tuple[str, Stored], ...] = ()
    note: str = ""
    copies: tuple[str, ...] = ()
    error: str = ""

    @property
    def owner(self) -> str:
        """Who claimed the key last: ``task_id@hostname:pid/id``; for a settled record only the task id."""
        return f"{self.task_id}@{self.worker}" if self.worker else self.task_id

    @property
    def settled_by_operator(self) -> bool:
        """Did an operator settle this record, not a run or a sweep?"""
        return self.state.is_final and self.note.startswith(("complete by ", "fail by "))

    @property
    def created_at(self) -> datetime:
        """When the key was first claimed."""
        return moment(self.created_ms)

    @property
    def updated_at(self) -> datetime:
        """When the record last changed its state."""
        return moment(self.updated_ms)

    @property
    def deadline(self) -> datetime | None:
        """When the lease runs out, for a PROCESSING record."""
        return None if self.deadline_ms is None else moment(self.deadline_ms)

    def stale(self, now_ms: int) -> bool:
        """Has the lease of this PROCESSING record run out at ``now_ms`` of the store's clock?"""
        over = self.deadline_ms is not None and self.deadline_ms <= now_ms
        return over and self.state is State.PROCESSING


class EarlierCall(NamedTuple):
    """The call that had a key before: its task id, the state of its record, and since when."""

    task_id: str
    state: State
    since: datetime


@dataclass(slots=True)
class ClaimRequest:
    """A worker's request for a key; while the claim holds, the same ``attempt`` gets the same token again.

    The record lives ``keep_ms`` longer than its lease. When the lease has run out, a sweep follows ``on_stale``.
    ``each_runs``: the end of another task is only its mark, and answers nobody but redeliveries of that task.
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
    each_runs: bool = False


@dataclass(slots=True, kw_only=True)
class ReserveRequest:
    """A publisher's request for a key whose message is taken for lost ``deadline_ms`` from now.

    A sweep then sends the ``message`` if no worker has claimed the key. The record lives ``keep_ms`` longer.
    ``each_runs`` as in a claim; ``copies``: its sender may send it twice.
    """

    identity: Identity
    task_id: str
    deadline_ms: int
    keep_ms: int
    fingerprint: bytes | None = None
    message: bytes | None = field(default=None, repr=False)  # has arguments
    uncommitted: bool = False
    copies: tuple[str, ...] = ()
    each_runs: bool = False


@dataclass(slots=True)
class SettleRequest:
    """The end of the claim that returned ``record``, for a store to keep for ``keep_ms``.

    Without ``restore``, from a caller that did not run it, a record that is gone or in another state than ``record``
    stays so. ``swept``: it comes from a sweep, and the owner may still replace it. An operator's ``note`` gives the
    record a new token, which refuses the earlier run. ``message``: for a person to run a failed one again.
    """

    record: Record
    state: EndState
    value: Stored | None
    keep_ms: int
    replaced: bool = False
    restore: bool = True
    swept: bool = False
    note: str = ""
    message: bytes | None = field(default=None, repr=False)  # has arguments
    error: str = ""


@dataclass(slots=True)
class ResultWrite:
    """A write of a result backend in Redis to ``key``, for ``expires_s`` (0: for ever), and to its channel."""

    key: bytes
    payload: bytes = field(repr=False)
    expires_s: int


#: The outcome of a settle with the task's result: nothing is written; the end state; also the result.
SettledWith = Literal["lost", "settled", "stored"]


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Renewal:
    """A claim to be renewed for ``lease_ms``."""

    identity: Identity
    token: int
    lease_ms: int
    keep_ms: int


@dataclass(slots=True)
class Claimed:
    """The caller has the key: run."""

    record: Record


@dataclass(slots=True)
class Held:
    """Another live claim holds the key for ``left_ms`` more milliseconds, unless it is renewed."""

    record: Record
    left_ms: int


@dataclass(slots=True)
class Settled:
    """The operation is done: replay. ``age_ms`` says for how long, by the store's clock."""

    record: Record
    age_ms: int


@dataclass(slots=True)
class Mismatched:
    """The key belongs to a call with another fingerprint: refuse."""

    record: Record


@dataclass(slots=True)
class Reserved:
    """The key waits for the message that is to be published under the record's task id."""

    record: Record


Reservation = Reserved | Held | Settled | Mismatched
Answer = Claimed | Held | Settled | Mismatched


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """The outcome of one sweep; the messages of the ``requeued`` are to be published now. Is there ``more`` to do?"""

    interrupted: tuple[Record, ...] = ()
    requeued: tuple[Record, ...] = ()
    more: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Selects the records that match all values; an empty set allows any, times are those of the last change.

    ``live``: QUEUED or PROCESSING, before the deadline; ``stale``: PROCESSING, after it; ``error``: FAILED with
    this class.
    """

    states: frozenset[State] = frozenset()
    namespace: str | None = None
    scopes: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    live: bool = False
    stale: bool = False
    since_ms: int | None = None
    before_ms: int | None = None
    error: str = ""

    @property
    def wanted(self) -> frozenset[State]:
        """The states that a record may be in."""
        if self.stale:
            return frozenset({State.PROCESSING})
        if self.live:
            return frozenset({State.QUEUED, State.PROCESSING})
        if self.error:
            return frozenset({State.FAILED})
        return self.states or frozenset(State)

    @property
    def scans(self) -> bool:
        """Does a store have to look at every key, as COMPLETED records have no index?"""
        return State.COMPLETED in self.wanted

    def names(self, identity: Identity) -> bool:
        """Does the identity alone allow the record?"""
        return (
            self.namespace in (None, identity.namespace)
            and (not self.scopes or identity.scope in self.scopes)
            and (not self.keys or identity.key in self.keys)
        )

    def includes(self, record: Record, now_ms: int) -> bool:
        """Is this one of the records, at ``now_ms`` of the store's clock?"""
        return (
            record.state in self.wanted
            and record.state in (self.states or self.wanted)
            and self.names(record.identity)
            and (not self.stale or record.stale(now_ms))
            and (not self.live or (record.deadline_ms or 0) > now_ms)
            and self.error in ("", record.error.partition(":")[0])
            and (self.since_ms is None or record.updated_ms >= self.since_ms)
            and (self.before_ms is None or record.updated_ms < self.before_ms)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list, without values, steps and messages; the ``cursor`` leads on, and is empty at the end."""

    records: tuple[Record, ...]
    cursor: str = ""
    looked_at: int
    now_ms: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The number of records that are not completed; ``live`` and ``stale`` ones are PROCESSING or QUEUED."""

    live: int
    stale: int
    failed: int
    now_ms: int
    interrupted: int = 0
    #: Of those that are live or stale, if an index tells.
    queued: int | None = None
    swept_ms: int | None = None
    #: The messages in the outbox, and for how long the oldest of them waits.
    outbox: int = 0
    outbox_ms: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Counted:
    """How often an outcome happened to a task within the minute or hour that began at ``start_ms``."""

    start_ms: int
    task: str
    outcome: str
    count: int
