"""A sweep of 1,000 stale keys: how long it takes among few and among many completed keys, and who has to wait."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import redis
from celery import Celery

from benchmarks.bystander import watching
from benchmarks.figures import Figure, Spread, percentile, ratios
from benchmarks.operations import claim, settle
from benchmarks.session import BenchmarkError, Server, Session
from celery_idempotent.celery import reaper
from celery_idempotent.records import Identity
from celery_idempotent.stores.redis.store import RedisStore

__all__ = ["run"]

GOAL_MS = 10.0
#: The longest script: so long another client waits at the most.
GOAL_SCRIPT_MS = 1.0
#: Equal cost, with some room for noise.
GOAL_RATIO = 1.2
STALE = 1000
FEW = 1_000

#: Copies of one COMPLETED record under other names, spread over the buckets.
_COPY = """
local record = redis.call('GET', KEYS[1])
for n = ARGV[1], ARGV[2] do
  redis.call('SET', 'idem:{' .. n % 1024 .. '}:bench.sweep::copy-' .. n, record, 'PX', 86400000)
end
"""
_CHUNK = 10_000
#: What the server's slow log takes, in us: all scripts of a sweep, but not each command in them, which would cost the
#: scripts a third of their time.
_LOGGED_US = 50


class Place:
    """A server with so many completed keys, and what sweeping it took."""

    def __init__(self, server: Server, completed: int) -> None:
        self.port = server.port
        self.client = redis.Redis(port=server.port)
        self.completed = completed
        self.app = Celery("bench", broker=server.url(1), set_as_current=False)
        self.app.conf.idempotency_store = self.store = RedisStore(server.url())
        self.wall: list[float] = []
        self.server_cpu: list[float] = []
        self.client_cpu: list[float] = []
        self.whole: list[float] = []
        self.idle: list[float] = []

    def fill(self) -> Iterator[int]:
        """Write the completed keys; yield how many, now and then."""
        settle(self.store, claim(self.store, Identity(namespace="bench.sweep", key="first")))
        name = next(self.client.scan_iter(match="*:bench.sweep::first", count=_CHUNK))
        for start in range(0, self.completed, _CHUNK):
            end = min(start + _CHUNK, self.completed) - 1
            self.client.eval(_COPY, 1, name, start, end)
            yield end + 1 - start

    def make_stale(self) -> None:
        """Claim keys whose lease has run out when this returns."""
        for number in range(STALE):
            identity = Identity(namespace="bench.sweep", key=f"stale-{number}")
            self.store.forget(identity)
            claim(self.store, identity, lease_ms=1)
        time.sleep(0.01)

    def sweep(self) -> tuple[float, float]:
        """Sweep; return when it began and ended."""
        self.make_stale()
        cpu, own_cpu, began = self._cpu_ms(), time.process_time(), time.perf_counter()
        report = self.store.sweep(limit=reaper.SWEEP_LIMIT)
        ended = time.perf_counter()
        self.client_cpu.append((time.process_time() - own_cpu) * 1000)
        self.server_cpu.append(self._cpu_ms() - cpu)
        self.wall.append((ended - began) * 1000)
        if len(report.interrupted) != STALE or report.more:
            raise BenchmarkError(f"a sweep found {len(report.interrupted)} of {STALE} stale keys")
        before = time.perf_counter()
        self.store.sweep(limit=reaper.SWEEP_LIMIT)
        self.idle.append((time.perf_counter() - before) * 1000)
        self.make_stale()
        before = time.perf_counter()
        reaper.sweep(self.app)
        self.whole.append((time.perf_counter() - before) * 1000)
        return began, ended

    def _cpu_ms(self) -> float:
        info: Any = self.client.info("cpu")
        return float(info["used_cpu_user"] + info["used_cpu_sys"]) * 1000


def run(session: Session) -> Iterator[Figure]:
    """Sweep two servers in turn, one with 10^3 and one with many more completed keys."""
    rounds = session.choose(quick=5, full=15)
    logger = logging.getLogger("celery_idempotent")
    level = logger.level
    logger.setLevel(logging.CRITICAL)  # a warning for each stale key
    try:
        with ExitStack() as stack:
            places = [
                Place(stack.enter_context(session.server()), size) for size in (FEW, session.keys)
            ]
            session.steps(FEW + session.keys, "sweep, filling")
            for place in places:
                for written in place.fill():
                    session.step(written)
            session.steps(2 * rounds, "sweep")
            for _ in range(rounds):
                for place in session.random.sample(places, len(places)):
                    place.sweep()
                session.step()
            figures = [*_figures(*places)]
            figures.append(_longest_script(session, places[1], rounds))
            figures.append(_waits(session, places[1], rounds))
    finally:
        logger.setLevel(level)
    yield from figures


def _figures(few: Place, many: Place) -> Iterator[Figure]:
    for place in (few, many):
        cpu = {
            "server_cpu_ms": Spread.of(place.server_cpu).median,
            "client_cpu_ms": Spread.of(place.client_cpu).median,
        }
        for what, times, goal in (
            ("1,000 stale", place.wall, GOAL_MS),
            ("the same by the beat task, signals and prune included", place.whole, None),
            ("nothing due", place.idle, None),
        ):
            yield Figure(
                benchmark="sweep",
                what=f"{what}, among {place.completed:,} completed",
                unit="ms",
                value=Spread.of(times),
                goal=goal,
                extra=cpu if times is place.wall else {},
            )
    yield Figure(
        benchmark="sweep",
        what=f"1,000 stale, among {many.completed:,}",
        unit="x",
        value=ratios(many.wall, few.wall),
        against=f"among {FEW:,}",
        goal=GOAL_RATIO,
    )


def _longest_script(session: Session, place: Place, rounds: int) -> Figure:
    """Return how long the longest script of each sweep took, by the server's own clock."""
    place.client.config_set("slowlog-log-slower-than", _LOGGED_US)
    place.client.config_set("slowlog-max-len", 10_000)
    longest: list[float] = []
    each: list[float] = []
    for _ in range(rounds):
        place.make_stale()
        place.client.slowlog_reset()
        place.store.sweep(limit=reaper.SWEEP_LIMIT)
        entries: Any = place.client.slowlog_get(10_000)
        scripts = [entry for entry in entries if entry["command"].startswith(b"EVAL")]
        took = [entry["duration"] / 1000 for entry in scripts]
        longest.append(max(took))
        each += took
        session.step()
    place.client.config_set("slowlog-log-slower-than", -1)
    return Figure(
        benchmark="sweep",
        what="the longest script of a sweep",
        unit="ms",
        value=Spread.of(longest),
        goal=GOAL_SCRIPT_MS,
        extra={"scripts": len(took), "median_script_ms": percentile(each, 50)},
    )


def _waits(session: Session, place: Place, rounds: int) -> Figure:
    with session.directory() as directory, watching(place.port, directory) as bystander:
        began = time.perf_counter()
        time.sleep(1)
        alone = [(began, time.perf_counter())]
        windows = []
        for _ in range(rounds):
            windows.append(place.sweep())
            session.step()
        during, before = bystander.waits(windows), bystander.waits(alone)
    return Figure(
        benchmark="sweep",
        what="another client's wait during it, p99",
        unit="ms",
        value=Spread(
            median=percentile(during, 99),
            low=percentile(during, 50),
            high=max(during),
            samples=len(during),
        ),
        against="beside it p50 and the longest",
        extra={
            "nobody_sweeping_p99_ms": percentile(before, 99),
            "nobody_sweeping_max_ms": max(before),
        },
    )
