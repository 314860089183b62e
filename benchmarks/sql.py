"""The verbs of DjangoStore on PostgreSQL against a bare INSERT and UPDATE of the same connection."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import postgresql
from benchmarks.figures import Figure, Spread, percentile, ratios
from benchmarks.session import BenchmarkError, Session

__all__ = ["run"]

_BASELINE = "bare INSERT and UPDATE"
_LOCKING = "SELECT … FOR UPDATE held around both", "SELECT … FOR UPDATE in a transaction each"
_PAIR = "claim and settle"
_GOALS = {_PAIR: 1.4, "in the task's own transaction": 1.6}
#: Half as long as what people write by hand.
_GOAL_LOCKING = 0.5


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
        bare = verb == _BASELINE
        yield Figure(
            benchmark="sql",
            what=verb,
            unit="us" if bare else "x",
            value=Spread.of(p50) if bare else ratios(p50, middle[_BASELINE]),
            against="" if bare else _BASELINE,
            goal=_GOALS.get(verb),
            extra={
                "p50_us": Spread.of(p50).median,
                "p99_us": Spread.of(late[verb]).median,
            },
        )
    for locking in _LOCKING:
        yield Figure(
            benchmark="sql",
            what=_PAIR,
            unit="x",
            value=ratios(middle[_PAIR], middle[locking]),
            against=locking,
            goal=_GOAL_LOCKING,
        )
