"""The pages of the admin over 10^6 completed records: in Redis, and in PostgreSQL where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.figures import Figure, Spread
from benchmarks.session import BenchmarkError, Session

__all__ = ["run"]

GOAL_MS = 300.0


def run(session: Session) -> Iterator[Figure]:
    """Open each page in turn, as a browser would, from session cookie to HTML."""
    if find_spec("django") is None:
        raise BenchmarkError("admin needs Django: pip install 'celery-idempotent[django]'")
    records = session.choose(quick=50_000, full=1_000_000)
    rounds = session.choose(quick=5, full=20)
    times: dict[tuple[str, str], list[float]] = {}
    session.steps(2 * rounds, f"admin, {records:,} records")
    with session.server() as server, session.directory() as directory:
        for store in ("redis", "postgresql"):
            arguments = (store, server.url(), directory, records, rounds)
            for said in session.child("admin_child", *arguments):
                for page, milliseconds in said.items():
                    times.setdefault((store, page), []).append(milliseconds)
                session.step()
    for (store, page), samples in times.items():
        yield Figure(
            benchmark="admin",
            what=f"{page}, {records:,} records in {store}",
            unit="ms",
            value=Spread.of(samples),
            goal=GOAL_MS,
            extra={"slowest_ms": max(samples)},
        )
