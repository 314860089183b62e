"""What a store is asked for, and how it answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import cast

from celery_idempotent.records.record import (
    EndState,
    Identity,
    OnStale,
    Record,
    Stored,
)


@dataclass(slots=True, kw_only=True)
class ClaimRequest:
    """What a worker asks a store for: the key, for whom, and for how long.

    ``attempt`` (8 random bytes, new for every claim) lets a claim whose answer was lost be repeated: while that claim
    holds, the same attempt gets the same token again.

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


@dataclass(slots=True, kw_only=True)
class ReserveRequest:
    """What a publisher asks a store for: the key, for a message that it is about to publish.

    The message counts as lost ``deadline_ms`` from now; the record lives ``keep_ms`` longer. ``message``, to be
    published under ``task_id``, is what a sweep sends then, should no worker have claimed the key.
    With ``uncommitted`` a transaction may still be rolled back, and the message then never sent.
    """

    identity: Identity
    task_id: str
    deadline_ms: int
    keep_ms: int
    fingerprint: bytes | None = None
    message: bytes | None = field(default=None, repr=False)  # has arguments
    uncommitted: bool = False


@dataclass(slots=True, kw_only=True)
class SettleRequest:
    """How the claim that returned ``record`` ended, for a store to keep for ``keep_ms``.

    Without ``restore`` (for who did not run it) a record that is gone stays gone, and one that is in another state than
    ``record`` stays as it is. Only with a ``record`` that was
    FAILED, a FAILED one ends anew. ``swept``: a sweep says so, and the owner may still replace it.
    ``note`` is the operator's who says so: the record keeps it, and gets a
    new token, which refuses whoever still runs.
    """

    record: Record
    state: EndState
    value: Stored | None
    keep_ms: int
    replaced: bool = False
    restore: bool = True
    swept: bool = False
    note: str = ""

    @property
    def by_operator(self) -> bool:
        """Does an operator say so? Nobody else lets what is seen as FAILED end anew."""
        return bool(self.note) or (self.record.state.settled and not self.restore)

    @classmethod
    def ending_as(cls, settled: Record, *, record: Record, keep_ms: int) -> SettleRequest:
        """Return what lets a claim end as another record has."""
        return cls(
            record=record,
            state=cast("EndState", settled.state),
            value=settled.value,
            keep_ms=keep_ms,
            replaced=settled.replaced,
        )


@dataclass(slots=True, kw_only=True)
class ResultWrite:
    """What a result backend in Redis writes for a finished task: to ``key``, and to the channel of the same name.

    The key is kept for ``expires_s`` seconds; 0: for ever.
    """

    key: bytes
    payload: bytes = field(repr=False)
    expires_s: int


class SettledWith(Enum):
    """What became of a settle that brought the task's result along."""

    LOST = "the key has another token: neither the end state nor the result is written"
    NOTHING = "the end state is written; the result is left to its backend"
    RESULT = "the end state is written, and the result is stored and published"


@dataclass(slots=True, kw_only=True, unsafe_hash=True)
class Renewal:
    """What its holder needs to renew a claim: identity, token, and for how many milliseconds to renew it."""

    identity: Identity
    token: int
    lease_ms: int
    keep_ms: int


@dataclass(slots=True)
class Claimed:
    """The caller has the key now: run."""

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
    """The key waits for the message that we are about to publish, under the record's task id."""

    record: Record


#: What a reservation can answer.
Reservation = Reserved | Held | Settled | Mismatched

#: What a claim can answer.
Answer = Claimed | Held | Settled | Mismatched
