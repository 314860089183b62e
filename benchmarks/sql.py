"""The verbs of DjangoStore on each database against the same by hand, through Django's connection."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks import databases
from benchmarks.figures import Figure, Spread, percentile, ratios
from benchmarks.session import BenchmarkError, Session

_BASELINE = "bare INSERT and UPDATE"
_BY_HAND, _ATOMIC = "a transaction by hand", "in the task's own transaction"
_PUBLISHED, _STAGED = "INSERT, COMMIT, publish", "INSERT and outbox, COMMIT, publish"
_AGAINST = {_BASELINE: "", _PUBLISHED: "", _ATOMIC: _BY_HAND, _STAGED: _PUBLISHED}


def run(session: Session) -> Iterator[Figure]:
    """Time every call in shuffled rounds."""
    servers = databases.available()
    if not servers:
        raise BenchmarkError(f"no database here: start {' or '.join(databases.SERVERS)}")
    rounds, calls = session.choose(quick=8, full=25), session.choose(quick=50, full=200)
    session.steps(rounds * len(servers), "sql")
    for server in servers:
        middle: dict[str, list[float]] = {}
        late: dict[str, list[float]] = {}
        seed = session.random.randrange(10_000)
        for times in session.child("sql_child", server, rounds, calls, seed):
            for verb, nanoseconds in times.items():
                middle.setdefault(verb, []).append(percentile(nanoseconds, 50) / 1000)
                late.setdefault(verb, []).append(percentile(nanoseconds, 99) / 1000)
            session.step()
        for verb, p50 in middle.items():
            against = _AGAINST.get(verb, _BASELINE)
            yield Figure(
                benchmark="sql",
                what=f"{server}: {verb}",
                unit="x" if against else "us",
                value=ratios(p50, middle[against]) if against else Spread.of(p50),
                against=against,
                extra={"p50_us": Spread.of(p50).median, "p99_us": Spread.of(late[verb]).median},
            )
