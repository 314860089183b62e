"""What a store tells of many records: sweeps, lists and counts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Literal

from celery_idempotent.records.record import EPOCH, Identity, Record, State


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
    """Records of which everything given is true; an empty set allows any value.

    ``keys`` and ``scopes`` are canonical forms, several where the text that somebody typed has several meanings. A
    scope of ``""`` is no scope. ``stale``: PROCESSING with a lease that ran out. ``since_ms`` and ``before_ms``: when
    the record changed its state, by the store's clock.
    """

    states: frozenset[State] = frozenset()
    namespace: str | None = None
    scopes: frozenset[str] = frozenset()
    keys: frozenset[str] = frozenset()
    stale: bool = False
    since_ms: int | None = None
    before_ms: int | None = None

    @property
    def wanted(self) -> frozenset[State]:
        """The states that a record may be in."""
        if self.stale:
            return frozenset({State.PROCESSING})
        return self.states or frozenset(State)

    @property
    def scans(self) -> bool:
        """Does a store have to look at every key? Only COMPLETED records have no index."""
        return State.COMPLETED in self.wanted

    @property
    def newest_first(self) -> bool:
        """Are only INTERRUPTED or only FAILED records wanted? Of these every store lists the newest first."""
        return self.wanted in ({State.INTERRUPTED}, {State.FAILED})

    def names(self, identity: Identity) -> bool:
        """Does the identity alone allow the record?"""
        return (
            self.namespace in (None, identity.namespace)
            and (not self.scopes or identity.scope in self.scopes)
            and (not self.keys or identity.key in self.keys)
        )

    def includes(self, record: Record, now_ms: int) -> bool:
        """Is this one of them, at ``now_ms`` of the store's clock?"""
        return (
            record.state in self.wanted
            and self.names(record.identity)
            and (not self.stale or record.stale(now_ms))
            and (self.since_ms is None or record.updated_ms >= self.since_ms)
            and (self.before_ms is None or record.updated_ms < self.before_ms)
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
        return EPOCH + timedelta(hours=self.hour)
