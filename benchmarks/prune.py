"""Getting rid of a million records on PostgreSQL: batches, two prunes at once, and a partition."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import postgresql
from benchmarks.figures import Figure, Spread
from benchmarks.session import BenchmarkError, Session

__all__ = ["run"]

_WAYS = 6


def run(session: Session) -> Iterator[Figure]:
    """Measure each way once, while another process writes to the same table."""
    if not postgresql.available():
        raise BenchmarkError(
            f"no PostgreSQL here, or no psycopg: start one, or name it in {postgresql.VARIABLE}"
        )
    count = session.choose(quick=50_000, full=1_000_000)
    session.steps(_WAYS, f"prune of {count:,}")
    for found in session.child("prune_child", count):
        what, seconds = found.pop("what"), found.pop("seconds")
        session.step()
        yield Figure(
            benchmark="prune",
            what=f"{count:,} records, {what}",
            unit="s",
            value=Spread.of([seconds]),
            extra=found,
        )
