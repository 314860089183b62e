"""The dashboard: records that need attention, outcomes by task, whether sweeps run, the state of the store."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from celery_idempotent.celery.checks import Finding, check_settings, check_store
from celery_idempotent.celery.reaper import SWEEP
from celery_idempotent.django.admin.charts import Chart, charts
from celery_idempotent.django.admin.forms import PERIODS
from celery_idempotent.django.admin.listing import oldest_processing
from celery_idempotent.operations.health import Sweeps, sweeps
from celery_idempotent.operations.wording import time_in_words
from celery_idempotent.records import Counted, Record, Stats
from celery_idempotent.stores import get_store
from celery_idempotent.stores.base import COUNTED_HOURS
from celery_idempotent.stores.listing import HOUR_MS

if TYPE_CHECKING:
    from celery import Celery


#: So many tasks have a chart, if none is named.
CHARTS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """What the dashboard shows.

    ``oldest`` has been PROCESSING for ``oldest_for``; ``oldest_of_many``: it is the oldest of those that were looked
    at. ``more`` tasks have no chart here. ``completed`` in the last 24 hours, as far as that was counted.
    ``answered_ms``: how long the store took to count.
    """

    store: str
    stats: Stats
    answered_ms: float
    oldest: Record | None
    oldest_for: str
    oldest_of_many: bool
    counts: bool
    sweeps: Sweeps
    charts: Sequence[Chart]
    more: int
    completed: int
    findings: Sequence[Finding]

    @property
    def tiles(self) -> dict[str, str]:
        """The counts in words."""
        return {name: self.stats.said(name) for name in ("live", "stale", "interrupted", "failed")}


def board(app: Celery, *, period: str, task: str) -> Board:
    """Return what there is to show; ``task``, if given, is the only one with a chart.

    Raises:
        StoreUnavailable: if the store does not answer.
    """
    store = get_store(app)
    began = time.perf_counter()
    stats = store.stats()
    answered_ms = (time.perf_counter() - began) * 1000
    oldest, oldest_of_many = oldest_processing(store)
    _, hours, step = PERIODS[period]
    counted = store.counts(hours=COUNTED_HOURS)
    last_hour = stats.now_ms // HOUR_MS
    drawn = charts(
        (each for each in counted if each.task != SWEEP and task in ("", each.task)),
        last_hour=last_hour,
        hours=hours,
        step=step,
    )
    return Board(
        store=repr(store),
        stats=stats,
        answered_ms=answered_ms,
        oldest=oldest,
        oldest_for=""
        if oldest is None
        else time_in_words(max(stats.now_ms - oldest.updated_ms, 0)),
        oldest_of_many=oldest_of_many,
        counts=store.supports_counting,
        sweeps=sweeps(app, stats),
        charts=drawn[:CHARTS],
        more=len(drawn[CHARTS:]),
        completed=_completed(each for each in counted if each.hour > last_hour - 24),
        findings=[*check_settings(app), *check_store(app)],  # workers would take a second
    )


def _completed(counted: Iterable[Counted]) -> int:
    """Return how many keys were settled, and not as failed."""
    outcomes: Counter[str] = Counter()
    for each in counted:
        outcomes[each.outcome] += each.count
    return max(outcomes["settled"] - outcomes["failed"], 0)
