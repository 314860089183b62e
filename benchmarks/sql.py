"""The verbs of DjangoStore on PostgreSQL against the same by hand, through Django's connection."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import postgresql
from benchmarks.figures import Figure, ratios
from benchmarks.session import BenchmarkError, Session
from benchmarks.verbs import compare, time_calls

_BASELINE, _PAIR = "bare INSERT and UPDATE", "claim and settle"
_BY_HAND, _ATOMIC = "a transaction by hand", "in the task's own transaction"


def run(session: Session) -> Iterator[Figure]:
    """Time every call in shuffled rounds."""
    if not postgresql.available():
        raise BenchmarkError(
            f"no PostgreSQL here, or no psycopg: start one, or name it in {postgresql.VARIABLE}"
        )
    rounds, calls = session.choose(quick=8, full=25), session.choose(quick=50, full=200)
    session.steps(rounds, "sql")
    middle, late = time_calls(session, "sql_child", rounds, calls)
    yield from compare(middle, late, "sql", _BASELINE, goals={_PAIR: 1.4})
    yield Figure(
        benchmark="sql",
        what=_ATOMIC,
        unit="x",
        value=ratios(middle[_ATOMIC], middle[_BY_HAND]),
        against=_BY_HAND,
        goal=1.6,
    )
