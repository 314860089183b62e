"""HTTP: what ``@idempotent_view`` on Redis adds to a view, for a first request and for a repetition."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.figures import Figure, Spread, ratios
from benchmarks.session import BenchmarkError, Session

#: What is measured, with the goal in milliseconds beyond the bare view.
GOALS = {"first request": 0.3, "repetition": 0.15}
BARE_VIEW, BARE_TRIP = "bare view", "bare EVALSHA"


def run(session: Session) -> Iterator[Figure]:
    """Call both views in one process, from request to response: blocks of each kind in shuffled order."""
    if find_spec("django") is None:
        raise BenchmarkError("http needs Django: pip install 'celery-idempotent[django]'")
    rounds = session.choose(quick=15, full=100)
    session.steps(rounds, "http")
    times: dict[str, list[float]] = {}
    with session.server() as server, session.directory() as directory:
        seed = session.random.randrange(10_000)
        for said in session.child("http_child", server.url(), directory, rounds, seed):
            for kind, milliseconds in said.items():
                times.setdefault(kind, []).append(milliseconds)
            session.step()
    bare, trip = times[BARE_VIEW], times[BARE_TRIP]
    for kind, goal in GOALS.items():
        added = list(map(operator.sub, times[kind], bare))
        cpu = list(map(operator.sub, times[f"{kind}, CPU"], times[f"{BARE_VIEW}, CPU"]))
        yield Figure(
            benchmark="http",
            what=f"{kind}, beyond the bare view",
            unit="ms",
            value=Spread.of(added),
            goal=goal,
            extra={
                "of_it_CPU_ms": Spread.of(cpu).median,
                "bare_view_ms": Spread.of(bare).median,
                "ratio_to_bare_view": ratios(times[kind], bare).median,
                "bare_EVALSHA_ms": Spread.of(trip).median,
                "in_bare_EVALSHAs": ratios(added, trip).median,
                "trips": Spread.of(times[f"{kind}, trips"]).median,
            },
        )
