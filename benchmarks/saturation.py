"""How many pairs of a claim and a settle one Redis takes from many clients, and what moves that bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.figures import Figure, Spread, ratios
from benchmarks.session import Session

__all__ = ["run"]


@dataclass(frozen=True, slots=True)
class Setup:
    """So many processes that claim and settle, and how the server is set up."""

    clients: int
    socket: bool = False
    with_result: bool = True
    options: Mapping[str, str] = field(default_factory=dict)


_COUNTS = {f"{n} client{'s' if n > 1 else ''}": Setup(n) for n in (1, 2, 4, 8, 16)}
_MOST = "16 clients"
#: What may move the bound.
_OTHERS = {
    "a Unix socket": Setup(16, socket=True),
    "results stored elsewhere": Setup(16, with_result=False),
    "an append-only file": Setup(16, options={"appendonly": "yes", "appendfsync": "everysec"}),
}


def run(session: Session) -> Iterator[Figure]:
    """Let more and more processes work on one server, in turn with servers that are set up otherwise."""
    setups = {**_COUNTS, **_OTHERS}
    rounds, seconds = session.choose(quick=1, full=5), session.choose(quick=1, full=3)
    session.steps(rounds * len(setups), "saturation")
    found: dict[str, list[Mapping[str, Any]]] = {name: [] for name in setups}
    for _ in range(rounds):
        for name in session.random.sample(list(setups), len(setups)):
            found[name].append(_measure(session, setups[name], seconds))
            session.step()
    for name in _COUNTS:
        yield _figure(name, "/s", Spread.of([_rate(each) for each in found[name]]), found[name])
    most = [_cpu_us(each) for each in found[_MOST]]
    full = Spread.of([1e6 / each for each in most])
    yield _figure(f"{_MOST}: full at", "/s", full, found[_MOST])
    for name in _OTHERS:
        cpu = ratios([_cpu_us(each) for each in found[name]], most)
        yield _figure(f"CPU of a pair, {name}", "x", cpu, found[name], against=_MOST)


def _measure(session: Session, setup: Setup, seconds: int) -> Mapping[str, Any]:
    with session.directory() as directory:
        path = directory / "redis.sock"
        options = {**setup.options, **({"unixsocket": str(path)} if setup.socket else {})}
        with session.server(options=options) as server:
            url = f"unix://{path}" if setup.socket else server.url()
            arguments = (url, seconds, setup.clients, int(setup.with_result))
            (found,) = session.child("saturation_child", *arguments)
    return dict(found)


def _rate(found: Mapping[str, Any]) -> float:
    return float(found["pairs"] / found["seconds"])


def _cpu_us(found: Mapping[str, Any]) -> float:
    """Return what the server's one thread took for a pair: its inverse is where it is full."""
    return float((found["user_s"] + found["kernel_s"]) / found["pairs"] * 1e6)


def _figure(
    what: str, unit: str, value: Spread, found: Sequence[Mapping[str, Any]], against: str = ""
) -> Figure:
    extra = {
        "server_cpu_us": [_cpu_us(each) for each in found],
        "kernel_us": [each["kernel_s"] / each["pairs"] * 1e6 for each in found],
        "share_of_core": [_cpu_us(each) * _rate(each) / 1e6 for each in found],
        "p50_us": [each["p50_us"] for each in found],
        "p99_us": [each["p99_us"] for each in found],
    }
    return Figure(
        benchmark="saturation",
        what=what,
        unit=unit,
        value=value,
        against=against,
        extra={name: Spread.of(values).median for name, values in extra.items()},
    )
