"""The verbs of DjangoStore on PostgreSQL against the same by hand, through Django's connection."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import postgresql
from benchmarks.figures import Figure, Spread, percentile, ratios
from benchmarks.session import BenchmarkError, Session

_BASELINE = "bare INSERT and UPDATE"
_BY_HAND, _ATOMIC = "a transaction by hand", "in the task's own transaction"
_GOALS = {"claim and settle": 1.4, _ATOMIC: 1.6}


def run(session: Session) -> Iterator[Figure]:
    """Time every call in shuffled rounds."""
    if not postgresql.available():
        raise BenchmarkError(
            f"no PostgreSQL here, or no psycopg: start one, or name it in {postgresql.VARIABLE}"
        )
    rounds, calls = session.choose(quick=8, full=25), session.choose(quick=50, full=200)
    session.steps(rounds, "sql")
    middle: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    for times in session.child("sql_child", rounds, calls, session.random.randrange(10_000)):
        for verb, nanoseconds in times.items():
            middle.setdefault(verb, []).append(percentile(nanoseconds, 50) / 1000)
            late.setdefault(verb, []).append(percentile(nanoseconds, 99) / 1000)
        session.step()
    for verb, p50 in middle.items():
        against = {_BASELINE: "", _ATOMIC: _BY_HAND}.get(verb, _BASELINE)
        yield Figure(
            benchmark="sql",
            what=verb,
            unit="x" if against else "us",
            value=ratios(p50, middle[against]) if against else Spread.of(p50),
            against=against,
            goal=_GOALS.get(verb),
            extra={"p50_us": Spread.of(p50).median, "p99_us": Spread.of(late[verb]).median},
        )
