"""Each verb of RedisStore against a bare ``EVALSHA`` of ``return 1`` by redis-py's normal client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec

from benchmarks.figures import Figure, Spread, percentile, ratios
from benchmarks.session import Session

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
    with session.server() as server:
        arguments = ("verbs_child", server.url(), rounds, calls)
        middle, late = time_calls(session, *arguments, hiredis=parser == "hiredis")
    yield from compare(middle, late, "verbs", _BASELINE, note=f" ({parser})")


def time_calls(
    session: Session, child: str, *arguments: object, hiredis: bool = True
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return the p50 and the p99 of each round in microseconds, by what is called."""
    middle: dict[str, list[float]] = {}
    late: dict[str, list[float]] = {}
    seed = session.random.randrange(10_000)
    for times in session.child(child, *arguments, seed, hiredis=hiredis):
        for verb, nanoseconds in times.items():
            middle.setdefault(verb, []).append(percentile(nanoseconds, 50) / 1000)
            late.setdefault(verb, []).append(percentile(nanoseconds, 99) / 1000)
        session.step()
    return middle, late


def compare(
    middle: Mapping[str, list[float]],
    late: Mapping[str, list[float]],
    benchmark: str,
    baseline: str,
    *,
    goals: Mapping[str, float] | None = None,
    note: str = "",
) -> Iterator[Figure]:
    """Yield a figure for each verb, as a ratio to the baseline of the same run."""
    for verb, p50 in middle.items():
        bare = verb == baseline
        yield Figure(
            benchmark=benchmark,
            what=f"{verb}{note}",
            unit="us" if bare else "x",
            value=Spread.of(p50) if bare else ratios(p50, middle[baseline]),
            against="" if bare else f"{baseline}{note}",
            goal=(goals or {}).get(verb),
            extra={
                "p50_us": Spread.of(p50).median,
                "p99_us": Spread.of(late[verb]).median,
                "p99_ratio": ratios(late[verb], late[baseline]).median,
            },
        )
