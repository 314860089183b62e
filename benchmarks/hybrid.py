"""A duplicate of a completed key: on a database, on Redis, and on a database with Redis before it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.figures import Figure, Spread, percentile, ratios
from benchmarks.session import BenchmarkError, Session

__all__ = ["run"]

_BASELINE, _CACHE_ALONE = "HybridStore", "RedisStore"
#: What the cache answers should take no longer than what a store in Redis does.
_GOAL = 1.05


def run(session: Session) -> Iterator[Figure]:
    """Time every call in shuffled rounds; each store against the hybrid of the same round."""
    if find_spec("django") is None:
        raise BenchmarkError("hybrid needs Django: pip install 'celery-idempotent[django]'")
    rounds, calls = session.choose(quick=8, full=25), session.choose(quick=100, full=300)
    session.steps(rounds, "hybrid")
    middle: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    with session.server() as server, session.directory() as directory:
        seed = session.random.randrange(10_000)
        arguments = (server.url(), directory, rounds, calls, seed)
        for times in session.child("hybrid_child", *arguments):
            for store, nanoseconds in times.items():
                middle.setdefault(store, []).append(percentile(nanoseconds, 50) / 1000)
                late.setdefault(store, []).append(percentile(nanoseconds, 99) / 1000)
            session.step()
    for store, p50 in middle.items():
        alone = store == _BASELINE
        yield Figure(
            benchmark="hybrid",
            what=f"duplicate on {store}",
            unit="us" if alone else "x",
            value=Spread.of(p50) if alone else ratios(p50, middle[_BASELINE]),
            against="" if alone else _BASELINE,
            extra={"p50_us": Spread.of(p50).median, "p99_us": Spread.of(late[store]).median},
        )
    yield Figure(
        benchmark="hybrid",
        what=f"duplicate on {_BASELINE}",
        unit="x",
        value=ratios(middle[_BASELINE], middle[_CACHE_ALONE]),
        against=_CACHE_ALONE,
        goal=_GOAL,
    )
