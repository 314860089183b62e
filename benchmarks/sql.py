"""The verbs of DjangoStore on PostgreSQL against a bare INSERT and UPDATE of the same connection."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import postgresql
from benchmarks.figures import Figure, ratios
from benchmarks.session import BenchmarkError, Session
from benchmarks.verbs import compare, time_calls

_BASELINE = "bare INSERT and UPDATE"
_LOCKING = "SELECT … FOR UPDATE held around both", "SELECT … FOR UPDATE in a transaction each"
_PAIR = "claim and settle"
_GOALS = {_PAIR: 1.4, "in the task's own transaction": 1.6}


def run(session: Session) -> Iterator[Figure]:
    """Time every call in shuffled rounds."""
    if not postgresql.available():
        raise BenchmarkError(
            f"no PostgreSQL here, or no psycopg: start one, or name it in {postgresql.VARIABLE}"
        )
    rounds, calls = session.choose(quick=8, full=25), session.choose(quick=50, full=200)
    session.steps(rounds, "sql")
    middle, late = time_calls(session, "sql_child", rounds, calls)
    yield from compare(middle, late, "sql", _BASELINE, goals=_GOALS)
    for locking in _LOCKING:
        yield Figure(
            benchmark="sql",
            what=_PAIR,
            unit="x",
            value=ratios(middle[_PAIR], middle[locking]),
            against=locking,
            goal=0.5,  # half as long as what people write by hand
        )
