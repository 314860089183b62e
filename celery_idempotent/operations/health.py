"""Whether all is well right now: the store answers, sweeps run, the outbox is sent."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.sweep import sweep_interval
from celery_idempotent.errors import InvalidOption
from celery_idempotent.operations.wording import time_in_words
from celery_idempotent.records import Stats

if TYPE_CHECKING:
    from celery import Celery

    from celery_idempotent.stores import Store

#: A message that waits in the outbox for longer has lost its sender, or its broker.
OUTBOX_MS = 60_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweeps:
    """Whether sweeps run: ``ago_ms`` is how long ago the last one ended, ``None`` if none has.

    ``interval`` is in seconds, ``None`` where this app asks for no sweeps.
    """

    interval: float | None
    ago_ms: int | None

    @property
    def ago(self) -> str:
        """How long ago the last one ended, for people."""
        return time_in_words(self.ago_ms or 0)

    @property
    def well(self) -> bool:
        """Did one end less than three intervals ago? Without an interval: did any?"""
        if self.ago_ms is None:
            return False
        return self.interval is None or self.ago_ms < 3000 * self.interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """How long the store took to count, the sweeps (``None`` where nothing notes them), the oldest waiting message."""

    answered_ms: float
    sweeps: Sweeps | None
    outbox_ms: int | None

    @property
    def sweeps_well(self) -> bool:
        """Do sweeps run, as far as this app asks for any and its store notes them?"""
        return self.sweeps is None or self.sweeps.interval is None or self.sweeps.well

    @property
    def outbox_well(self) -> bool:
        """Are messages sent?"""
        return self.outbox_ms is None or self.outbox_ms <= OUTBOX_MS

    @property
    def well(self) -> bool:
        """Is all well?"""
        return self.sweeps_well and self.outbox_well

    def as_json(self) -> dict[str, object]:
        """Return it for programs; unknown figures are ``None``."""
        return {
            "well": self.well,
            "store": {"well": True, "answered_ms": round(self.answered_ms, 1)},
            "sweep": {
                "well": self.sweeps_well,
                "ago_s": _seconds(None if self.sweeps is None else self.sweeps.ago_ms),
            },
            "outbox": {"well": self.outbox_well, "oldest_s": _seconds(self.outbox_ms)},
        }


def health(app: Celery, store: Store, *, outbox_ms: int | None) -> Health:
    """Ask the store; ``outbox_ms`` is the age of the oldest message in the outbox of the Django project.

    Raises:
        StoreUnavailable: if the store does not answer.
    """
    began = time.perf_counter()
    stats = store.stats()
    return Health(
        answered_ms=(time.perf_counter() - began) * 1000,
        sweeps=sweeps(app, stats) if store.supports_counting else None,
        outbox_ms=outbox_ms,
    )


def sweeps(app: Celery, stats: Stats) -> Sweeps:
    """Return whether sweeps run, by what the store counted."""
    try:
        interval = sweep_interval(app)
    except InvalidOption:
        interval = None  # a worker does not start with it, and says so
    ago_ms = None if stats.swept_ms is None else max(stats.now_ms - stats.swept_ms, 0)
    return Sweeps(interval=interval, ago_ms=ago_ms)


def _seconds(ms: int | None) -> int | None:
    return None if ms is None else ms // 1000
