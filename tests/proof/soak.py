"""A steady load: memory, connections, threads, bytes a key and p99 stay flat (``--full``: an hour)."""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import psutil

from tests.proof import Options, Row
from tests.proof.chaos import plan as planning
from tests.proof.chaos.arena import Arena
from tests.proof.chaos.checker import Checker, missing
from tests.proof.chaos.servers import Servers

STORES = ("redis", "postgresql")
#: Calls a second; and how often it is looked.
RATE, SAMPLES = 8, 60
P99 = "p99 from call to effect, ms"
_TABLE = "celery_idempotent_record"


def _sample(arena: Arena) -> Iterator[tuple[str, float]]:
    processes = [psutil.Process(pid) for worker in (0.0, 0.001) for pid in arena.pids(worker)]
    yield "memory of the workers, MB", sum(each.memory_info().rss for each in processes) / 1e6
    yield "files and connections", sum(each.num_fds() for each in processes)
    yield "threads", sum(each.num_threads() for each in processes)
    store = arena.servers.stores[0]
    if store.kind == "redis":
        info = store.client().info()
        yield "connections of the store", info["connected_clients"]
        yield "bytes a key", info["used_memory_dataset"] / max(info["db2"]["keys"], 1)
    else:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        yield "connections of the store", arena.query(sql)[0][0]
        sql = f"SELECT pg_total_relation_size('{_TABLE}')::float / count(*) FROM {_TABLE}"
        yield "bytes a row, with indexes and bloat", arena.query(sql)[0][0]


def _latencies(arena: Arena) -> Iterator[tuple[float, float]]:
    """Yield when a call was made, and the seconds until its first effect."""
    called: dict[str, float] = {}
    for note in sorted(arena.notes(), key=lambda each: each.get("first", each["t"])):
        if note["what"] == "call" and note["kind"] in ("keyed", "by_id"):
            called.setdefault(note["units"][0], note["first"])
        elif note["what"] == "effect" and note["unit"] in called:
            begun = called.pop(note["unit"])
            yield begun, note["t"] - begun


def rows(store: str, seed: int, minutes: float) -> Iterator[Row]:
    """Put the load on two workers; yield a row for what ran, and one for each figure."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    plan = planning.make(seed, minutes * 60, RATE, store, "redis")._replace(strikes=[])
    pause = minutes * 60 / SAMPLES
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        servers = Servers(store, "redis", Path(directory))
        try:
            with Arena(servers, Path(directory)) as arena:
                begun = time.time()
                playing = threading.Thread(target=arena.play, args=(plan,))
                playing.start()
                while playing.is_alive():
                    playing.join(pause)
                    for name, value in _sample(arena):
                        series[name].append((time.time() - begun, value))
                arena.rest(lambda: not missing(arena.notes()), quiet_s=30, longest_s=60)
                checked = Checker(arena.notes(), store=store, broker="redis", library="ours")
                windows: dict[int, list[float]] = defaultdict(list)
                for at, seconds in _latencies(arena):
                    windows[int((at - begun) / pause / 4)].append(seconds * 1000)
        finally:
            servers.close()
    for n, some in sorted(windows.items())[:-1]:
        series[P99].append((n * pause * 4, statistics.quantiles(some, n=100)[98]))
    about = {"name": "soak", "command": "python -m tests.proof soak --full"}
    what, wrong = f"{store}, {minutes:g} minutes", [*checked.lost, *checked.doubled, *checked.wrong]
    found = f"{len(wrong)} lost, doubled or wrong"
    yield Row(what=what, how_many=f"{checked.calls} calls", found=found, held=not wrong, **about)
    for name, values in series.items():
        times, figures = zip(*values[len(values) // 3 :], strict=True)  # it is warm by then
        slope, mean = statistics.linear_regression(times, figures).slope, statistics.mean(figures)
        growth = slope * (times[-1] - times[0]) / mean
        told = (
            f"{mean:.4g} on average, slope {slope * 3600:+.3g} an hour ({growth:+.1%} in the time)"
        )
        # The time is that of a machine with other work, too.
        flat = growth < (0.5 if name == P99 else 0.1)
        how_many = f"{len(figures)} samples"
        yield Row(what=f"{store}: {name}", how_many=how_many, found=told, held=flat, **about)


def run(options: Options) -> list[Row]:
    """Soak each store for half an hour; nothing without ``--full``."""
    return [row for store in STORES if options.full for row in rows(store, options.seed, 30)]
