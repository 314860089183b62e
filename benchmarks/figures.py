"""One measured figure with its spread, and the statistics behind it."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """The median and the quartiles of several samples."""

    median: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, samples: Sequence[float]) -> Spread:
        return cls(
            median=statistics.median(samples),
            low=percentile(samples, 25),
            high=percentile(samples, 75),
            samples=len(samples),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """What was measured: a ratio to ``against`` (``unit`` is "x"), or an amount.

    ``extra`` holds further measurements, by name and with the unit in the name.
    """

    benchmark: str
    what: str
    unit: str
    value: Spread
    against: str = ""
    goal: float | None = None
    extra: Mapping[str, float] = field(default_factory=dict)

    @property
    def met(self) -> bool | None:
        """Is the goal reached? None if there is none."""
        return None if self.goal is None else self.value.median <= self.goal


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the percentile, interpolated between the two nearest samples."""
    ordered = sorted(samples)
    at = (len(ordered) - 1) * percent / 100
    below = int(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def ratios(samples: Sequence[float], baseline: Sequence[float]) -> Spread:
    """Compare two series pair by pair: what was measured at about the same time."""
    return Spread.of([one / other for one, other in zip(samples, baseline, strict=True)])


def compared(
    benchmark: str,
    what: str,
    wall: Mapping[str, Sequence[float]],
    cpu: Mapping[str, Sequence[float]],
    name: str,
    against: tuple[str, str] = ("plain", "celery.Task"),
    goal: float | None = None,
) -> Figure:
    """Return the ratio of one series of times to another, that of ``against`` (its name, its label)."""
    baseline, label = against
    return Figure(
        benchmark=benchmark,
        what=what,
        unit="x",
        value=ratios(wall[name], wall[baseline]),
        against=label,
        goal=goal,
        extra={
            "us": Spread.of(wall[name]).median,
            "baseline_us": Spread.of(wall[baseline]).median,
            "cpu_ratio": ratios(cpu[name], cpu[baseline]).median,
        },
    )
