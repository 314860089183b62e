"""Counters as charts: bars made on the server, with their sums in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from celery_idempotent.celery.story import SERIES
from celery_idempotent.records import Counted, moment
from celery_idempotent.stores.base import HOUR

_SERIES_OF = {outcome: name for name, outcomes in SERIES.items() for outcome in outcomes}

#: A chart shows so many hours. The template draws it 100 units high, each hour 10 wide, of which a bar takes 8.
HOURS = 24


class Bar(NamedTuple):
    """A part of an hour's bar."""

    series: str
    x: int
    y: float
    height: float
    title: str


class Chart(NamedTuple):
    """The outcomes of a task by hour, and their sums by series, also in words."""

    task: str
    totals: Mapping[str, int]
    highest: int
    bars: Sequence[Bar]
    summary: str


def charts(counted: Iterable[Counted], *, last_hour: int) -> list[Chart]:
    """Return a chart for each task, the busiest first."""
    first = last_hour - HOURS + 1
    tasks: dict[str, list[Counter[str]]] = {}
    for each in counted:
        series = _SERIES_OF.get(each.outcome)
        if series is not None and first <= each.start_ms // HOUR.ms <= last_hour:
            hours = tasks.setdefault(each.task, [Counter() for _ in range(HOURS)])
            hours[each.start_ms // HOUR.ms - first][series] += each.count
    found = [_chart(task, hours, first) for task, hours in tasks.items()]
    return sorted(found, key=lambda chart: (-sum(chart.totals.values()), chart.task))


def _chart(task: str, hours: Sequence[Counter[str]], first: int) -> Chart:
    """Draw a bar for each hour from ``first`` on, its series piled up; SVG counts from the top."""
    # A run that was released or failed is drawn once, as that.
    drawn = [
        {**hour, "runs": max(hour["runs"] - hour["failures"] - hour["releases"], 0)}
        for hour in hours
    ]
    highest = max(sum(hour.values()) for hour in drawn)
    bars = []
    for n, hour in enumerate(hours):
        at, y = moment((first + n) * HOUR.ms), 100.0
        for series in SERIES:
            if count := drawn[n].get(series):
                height = round(100 * count / highest, 2)
                y = max(round(y - height, 2), 0.0)
                title = f"{at:%Y-%m-%d %H:%M} UTC: {series} {hour[series]:,}"
                bars.append(Bar(series, n * 10 + 1, y, height, title))
    totals = {series: sum(hour[series] for hour in hours) for series in SERIES}
    summary = ", ".join(f"{series} {number:,}" for series, number in totals.items())
    return Chart(task=task, totals=totals, highest=highest, bars=bars, summary=summary)
