"""Counters of the first page: a chart, whose bars are made on the server, and the errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from celery_idempotent.celery.story import SERIES
from celery_idempotent.records import Counted, moment
from celery_idempotent.stores.base import Period

_SERIES_OF = {outcome: name for name, outcomes in SERIES.items() for outcome in outcomes}


class Chart(NamedTuple):
    """The outcomes of all tasks, 100 units high, each period 10 wide; ``summary``: their sums by series, in words.

    A bar is a series, its place and size, and a title.
    """

    highest: int
    bars: Sequence[tuple[str, int, float, float, str]]
    summary: str


def chart(counted: Iterable[Counted], period: Period, times: int, now_ms: int) -> Chart:
    """Draw a bar for each of so many periods until now, its series piled up; SVG counts from the top."""
    counts = {period.start(now_ms, ago): Counter[str]() for ago in reversed(range(times))}
    for each in counted:
        series = _SERIES_OF.get(each.outcome)
        if series is not None and each.start_ms in counts:
            counts[each.start_ms][series] += each.count
    # A run that was released or failed is drawn once, as that.
    drawn = {
        start: {**of, "runs": max(of["runs"] - of["failures"] - of["releases"], 0)}
        for start, of in counts.items()
    }
    highest = max(sum(of.values()) for of in drawn.values())
    bars = []
    for n, (start, of) in enumerate(drawn.items()):
        y = 100.0
        for series in SERIES:
            if count := of.get(series):
                height = round(100 * count / highest, 2)
                y = max(round(y - height, 2), 0.0)
                title = f"{moment(start):%Y-%m-%d %H:%M} UTC: {series} {counts[start][series]:,}"
                bars.append((series, n * 10 + 1, y, height, title))
    sums = {series: sum(of[series] for of in counts.values()) for series in SERIES}
    return Chart(
        highest, bars, ", ".join(f"{series} {number:,}" for series, number in sums.items())
    )


def errors(counted: Iterable[Counted]) -> list[tuple[str, str, str, int]]:
    """Return class, task, end ("failed" or "released") and number of all errors, the most frequent first."""
    found: Counter[tuple[str, str, str]] = Counter()
    for each in counted:
        end, colon, kind = each.outcome.partition(":")
        if colon:
            found[kind, each.task, end] += each.count
    return [(*about, number) for about, number in found.most_common()]
