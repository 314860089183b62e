"""Each verb of RedisStore against a bare ``EVALSHA`` of ``return 1`` by redis-py's normal client."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.figures import Figure, Spread, percentile, ratios
from benchmarks.session import Session

__all__ = ["run"]

_BASELINE = "bare EVALSHA"


def run(session: Session) -> Iterator[Figure]:
    """Time every call in shuffled rounds, with each parser that redis-py has."""
    rounds, calls = session.choose(quick=8, full=25), session.choose(quick=200, full=500)
    parsers = ["pure Python"]
    if find_spec("hiredis"):
        parsers.insert(0, "hiredis")
    session.steps(rounds * len(parsers), "verbs")
    for parser in parsers:
        yield from _measure(session, parser, rounds, calls)


def _measure(session: Session, parser: str, rounds: int, calls: int) -> Iterator[Figure]:
    middle: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    with session.server() as server:
        seed = session.random.randrange(10_000)
        arguments = (server.url(), rounds, calls, seed)
        for times in session.child("verbs_child", *arguments, hiredis=parser == "hiredis"):
            for verb, nanoseconds in times.items():
                middle.setdefault(verb, []).append(percentile(nanoseconds, 50) / 1000)
                late.setdefault(verb, []).append(percentile(nanoseconds, 99) / 1000)
            session.step()
    for verb, p50 in middle.items():
        bare = verb == _BASELINE
        yield Figure(
            benchmark="verbs",
            what=f"{verb} ({parser})",
            unit="us" if bare else "x",
            value=Spread.of(p50) if bare else ratios(p50, middle[_BASELINE]),
            against="" if bare else f"{_BASELINE} ({parser})",
            extra={
                "p50_us": Spread.of(p50).median,
                "p99_us": Spread.of(late[verb]).median,
                "p99_ratio": ratios(late[verb], late[_BASELINE]).median,
            },
        )
