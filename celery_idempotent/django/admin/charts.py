"""Counters as charts: bars made on the server, with the same figures in a table for those who do not see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone

from celery_idempotent.records import Counted

#: What is drawn, from below, and the outcomes that it adds up. A run ends ``settled`` (which is not drawn), ``failed``
#: or ``released``: the key was given back, because the run failed or asked for a retry.
SERIES: Mapping[str, tuple[str, ...]] = {
    "runs": ("claimed",),
    "releases": ("released",),
    "failures": ("failed",),
    "replays": ("replayed",),
    "conflicts": ("conflicted",),
    "trouble": ("mismatched", "interrupted", "lease_lost", "settle_failed", "store_failed"),
}
_SERIES_OF = {outcome: name for name, outcomes in SERIES.items() for outcome in outcomes}

#: A chart shows so many hours.
HOURS = 24

#: A chart is so high and a bar so wide, in units of its own.
HEIGHT, _WIDTH, _GAP = 100, 10, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A part of a bar of a chart."""

    series: str
    x: int
    y: float
    height: float
    title: str

    @property
    def width(self) -> int:
        """As wide as all others."""
        return _WIDTH - _GAP


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartRow:
    """What happened from a moment on, by series."""

    at: datetime
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Chart:
    """What happened to a task over time. ``rows`` are all of it, ``totals`` its sums, by series.

    A bar stands for an hour. Runs that were released or failed are parts of their own, above the other runs.
    """

    task: str
    rows: Sequence[ChartRow]
    totals: Mapping[str, int]
    highest: int
    bars: Sequence[Bar]

    @property
    def width(self) -> int:
        """In the units of its bars."""
        return len(self.rows) * _WIDTH

    @property
    def summary(self) -> str:
        """The sums, in words."""
        return ", ".join(f"{number:,} {series}" for series, number in self.totals.items())

    @property
    def busy(self) -> list[ChartRow]:
        """The rows in which something happened."""
        return [row for row in self.rows if any(row.counts)]


def charts(counted: Iterable[Counted], *, last_hour: int) -> list[Chart]:
    """Return a chart for each task, the busiest first."""
    first = last_hour - HOURS + 1
    tasks: dict[str, list[Counter[str]]] = {}
    for each in counted:
        series = _SERIES_OF.get(each.outcome)
        if series is not None and first <= each.hour <= last_hour:
            columns = tasks.setdefault(each.task, [Counter() for _ in range(HOURS)])
            columns[each.hour - first][series] += each.count
    found = [_chart(task, columns, first) for task, columns in tasks.items()]
    return sorted(found, key=lambda chart: (-sum(chart.totals.values()), chart.task))


def _chart(task: str, columns: Sequence[Counter[str]], first: int) -> Chart:
    """Draw the counts of one task: a column for each hour from ``first`` on, its series piled up.

    SVG counts from the top, and so each bar begins where the one below it ended: at ``bottom`` less its own height.
    """
    drawn = [_drawn(column) for column in columns]
    highest = max(sum(column.values()) for column in drawn)
    rows, bars = [], []
    for n, column in enumerate(columns):
        at = datetime.fromtimestamp((first + n) * 3600, tz=timezone.utc)
        rows.append(ChartRow(at=at, counts=tuple(column[series] for series in SERIES)))
        bottom = float(HEIGHT)
        for series in SERIES:
            if drawn[n][series]:
                height = round(HEIGHT * drawn[n][series] / highest, 2)
                bottom = round(bottom - height, 2)
                title = f"{at:%Y-%m-%d %H:%M} UTC: {column[series]:,} {series}"
                x, y = n * _WIDTH + _GAP // 2, max(bottom, 0.0)
                bars.append(Bar(series=series, x=x, y=y, height=height, title=title))
    return Chart(
        task=task,
        rows=rows,
        totals={series: sum(column[series] for column in columns) for series in SERIES},
        highest=highest,
        bars=bars,
    )


def _drawn(column: Counter[str]) -> Counter[str]:
    """Return what is drawn of a bar: a run that was released or failed once, not twice."""
    ended = column["failures"] + column["releases"]
    return Counter({**column, "runs": max(column["runs"] - ended, 0)})
