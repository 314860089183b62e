"""How long a key waits after its run was lost: from the fault to the next run, beside what is promised."""

from __future__ import annotations

import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.proof import Options, Row
from tests.proof.chaos.arena import VISIBILITY, Arena
from tests.proof.chaos.faults import send
from tests.proof.chaos.servers import BROKERS, Servers
from tests.proof.chaos.tasks import LEASE
from tests.support.waiting import wait_for

TRIALS, AT_ONCE = 30, 6
#: Longer than a claim tries, also where the store is silent.
FROZEN = 10


def _claims(arena: Arena, keys: list[str]) -> dict[str, dict[str, Any]]:
    """Return the first claim of each key."""
    found: dict[str, dict[str, Any]] = {}
    for note in arena.notes():
        key = note["id"].rpartition(" ")[2] if note.get("verb") == "claimed" else ""
        if key in keys:
            found.setdefault(key, note)
    return found


def _effects(arena: Arena, keys: list[str]) -> dict[str, float]:
    units = {f"keyed {key}": key for key in keys}
    return {units[x["unit"]]: x["t"] for x in arena.notes() if x.get("unit") in units}


def _lose(arena: Arena, strike: Callable[[list[int]], list[int]]) -> list[float]:
    """Have some keys run, strike, and return the seconds until each lost one took effect."""
    keys = [arena.call(random.random(), hangs=True) for _ in range(AT_ONCE)]
    wait_for(lambda: len(_claims(arena, keys)) == AT_ONCE, 30, "the runs")
    claims, began = _claims(arena, keys), time.time()
    struck = strike([claim["pid"] for claim in claims.values()])
    # Not those that are about to end, since others had to wait for a process.
    is_young = {key for key in keys if claims[key]["t"] > began - 5}
    lost = [key for key in keys if claims[key]["pid"] in struck and key in is_young]
    arena.rest(lambda: len(_effects(arena, keys)) == AT_ONCE, quiet_s=90, longest_s=90)
    return [_effects(arena, lost).get(key, began + 90) - began for key in lost]


def _freeze(arena: Arena) -> list[float]:
    """Freeze the store while calls wait for it; return the seconds from its thaw to each effect."""
    arena.servers.stores[0].signal(signal.SIGSTOP)
    keys = [arena.call(random.random()) for _ in range(AT_ONCE)]
    time.sleep(FROZEN)
    arena.servers.stores[0].signal(signal.SIGCONT)
    began = time.time()
    arena.rest(lambda: len(_effects(arena, keys)) == AT_ONCE, quiet_s=90, longest_s=90)
    return [t - began for t in _effects(arena, keys).values()]


@contextmanager
def _arena(broker: str) -> Iterator[Arena]:
    with tempfile.TemporaryDirectory(prefix="recovery-") as directory:
        servers = Servers("redis", broker, Path(directory))
        try:
            with Arena(servers, Path(directory), concurrency=AT_ONCE // 2) as arena:
                yield arena
        finally:
            servers.close()


def measure(broker: str, trials: int) -> Iterator[tuple[str, list[float], float, str]]:
    """Yield for each fault the seconds, the longest that is promised, and of what that consists."""
    conflict, pool, longest = 2, 5, 2  # the tests' longest pauses of a copy
    back = max(LEASE, VISIBILITY + 1) if broker == "redis" else LEASE
    of_back = f"lease {LEASE} s" + (f", visibility {VISIBILITY} s" if broker == "redis" else "")

    with _arena(broker) as arena:

        def kill_worker(_: list[int]) -> list[int]:
            return send(arena.pids(0.0))

        def kill_all(_: list[int]) -> list[int]:
            return send(arena.pids(0.0)) + send(arena.pids(0.001))

        kinds: dict[str, tuple[Callable[[], list[float]], float, str]] = {
            "child killed": (lambda: _lose(arena, send), pool + conflict, "its pool notices: 5 s"),
            "worker killed": (lambda: _lose(arena, kill_worker), back + conflict, of_back),
            "machine lost": (lambda: _lose(arena, kill_all), back + conflict, of_back),
            "store frozen": (lambda: _freeze(arena), 8 + longest, f"a claim's patience and {longest} s"),
        }  # fmt: skip
        for name, (trial, promised, of_what) in kinds.items():
            seconds: list[float] = []
            while len(seconds) < trials:
                seconds += trial()
            yield name, seconds, promised, of_what


def run(options: Options) -> list[Row]:
    rows = []
    for broker in BROKERS if options.full else BROKERS[options.seed % 2 :][:1]:
        for name, seconds, promised, of_what in measure(
            broker, TRIALS if options.full else AT_ONCE
        ):
            cuts = statistics.quantiles(seconds, n=100, method="inclusive")
            found = f"p50 {cuts[49]:.1f} s, p99 {cuts[98]:.1f} s; promised: {of_what}"
            what = f"{name}, redis, {broker}"
            # A machine that is busy needs some seconds to start a worker.
            held = cuts[98] <= promised + 15
            command = "python -m tests.proof recovery --full"
            rows.append(Row(name="recovery", what=what, how_many=f"{len(seconds)} keys", found=found, command=command, held=held))  # fmt: skip  # noqa: E501
    return rows
