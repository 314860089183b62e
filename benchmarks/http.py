"""HTTP: the instructions that each door on Redis adds to a request, for a first one and for a repetition."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from benchmarks.figures import Figure, Spread
from benchmarks.instructions import count
from benchmarks.session import BenchmarkError, Session

_DOORS, _KINDS = ("@idempotent_view", "WSGI", "ASGI"), ("bare", "first request", "repetition")
#: What a view may add, in thousands; a verb of the store takes about 75, its answer of a completed key 120.
_GOALS = {"first request": 260, "repetition": 180}


def run(session: Session) -> Iterator[Figure]:
    """Count each in two runs that differ in nothing but how often it is done."""
    if find_spec("django") is None:
        raise BenchmarkError("http needs Django: pip install celery-idempotent[django]")
    names = [f"{door}: {kind}" for door in _DOORS for kind in _KINDS]
    session.steps(len(names), "http")
    with session.server() as server, session.directory() as directory:
        counts = count("http", names, session.choose(quick=100, full=400), server, directory)
    for door in _DOORS:
        bare = counts[f"{door}: bare"] / 1000
        for kind in _KINDS[1:]:
            yield Figure(
                benchmark="http",
                what=f"{door}: {kind}, beyond the bare application",
                unit="thousand",
                value=Spread.of([counts[f"{door}: {kind}"] / 1000 - bare]),
                goal=_GOALS[kind] if door == _DOORS[0] else None,
                extra={"bare_thousands": bare},
            )
