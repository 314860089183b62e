"""What a store tells of many records: sweeps, lists and counts."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Literal

from celery_idempotent.records.frozen import sealed
from celery_idempotent.records.record import EPOCH, Record, State


@sealed(frozen=True, slots=True, kw_only=True)
class SweepReport:
    """What one sweep did, with the records as they are now.

    ``requeued`` are QUEUED, and their messages are to be published now, before their deadlines. ``more`` says that
    its limit left more to do.
    """

    interrupted: tuple[Record, ...] = ()
    requeued: tuple[Record, ...] = ()
    more: bool = False


@sealed(frozen=True, slots=True, kw_only=True)
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


@sealed(frozen=True, slots=True, kw_only=True)
class Page:
    """A part of a list: records without their values, steps and messages, as of ``now_ms`` of the store's clock.

    ``cursor`` asks for what follows and is empty at the end; ``looked_at`` is how many keys this page took.
    """

    records: tuple[Record, ...]
    cursor: str = ""
    looked_at: int
    now_ms: int


@sealed(frozen=True, slots=True, kw_only=True)
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
        return None if self.swept_ms is None else EPOCH + timedelta(milliseconds=self.swept_ms)

    def said(self, name: Literal["live", "stale", "interrupted", "failed"]) -> str:
        """Return a count for people, with a plus where there may be more."""
        plus = "+" if name in self.at_least else ""
        return f"{getattr(self, name):,}{plus}"


@sealed(frozen=True, slots=True, kw_only=True)
class Counted:
    """How often something happened to a task within one hour; ``hour`` counts from the epoch, by the store's clock."""

    hour: int
    task: str
    outcome: str
    count: int

    @property
    def at(self) -> datetime:
        """When the hour began."""
        return EPOCH + timedelta(hours=self.hour)
