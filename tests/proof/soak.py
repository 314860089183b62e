"""A steady load, for an hour: memory, connections, threads, bytes a key, the size of the table and p99 stay flat.

``python -m tests.proof soak --full``, or ``python -m tests.proof.soak --minutes 10``.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path

import psutil

from tests.proof import Options, Row
from tests.proof.chaos import plan as planning
from tests.proof.chaos.arena import Arena
from tests.proof.chaos.checker import Checker, missing
from tests.proof.chaos.servers import Servers

STORES = ("redis", "postgresql")
RATE, SAMPLES = 8, 60
#: What a figure may grow in the time, of its mean: it is measured on a machine with other work.
GROWTH = 0.10

Series = dict[str, list[tuple[float, float]]]


def _sample(arena: Arena) -> dict[str, float]:
    """Return what the workers and the store have now."""
    processes = [psutil.Process(pid) for worker in range(2) for pid in arena.pids(worker / 1000)]
    store = arena.servers.stores[0]
    found = {
        "memory of the workers, MB": sum(each.memory_info().rss for each in processes) / 1e6,
        "files and connections": sum(each.num_fds() for each in processes),
        "threads": sum(each.num_threads() for each in processes),
    }
    if store.kind == "redis":
        info = store.client().info()
        found["connections of the store"] = info["connected_clients"]
        found["bytes a key"] = info["used_memory_dataset"] / max(info["db2"]["keys"], 1)
    else:
        sql = "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'"
        found["connections of the store"] = arena.query(sql)[0][0]
        table = "celery_idempotent_record"
        size = f"SELECT pg_total_relation_size('{table}')::float / count(*) FROM {table}"
        found["bytes a row, with indexes"] = arena.query(size)[0][0]
    return found


def _latencies(arena: Arena) -> list[tuple[float, float]]:
    """Return when a call was made, and the seconds from its making to the effect of its first run."""
    called: dict[str, float] = {}
    found = []
    for note in sorted(arena.notes(), key=lambda each: each.get("first", each["t"])):
        if note["what"] == "call":
            for unit in note["units"] if note["kind"] in ("keyed", "by_id") else ():
                called.setdefault(unit, note["first"])
        elif note["what"] == "effect" and note["unit"] in called:
            begun = called.pop(note["unit"])
            found.append((begun, note["t"] - begun))
    return found


def soak(store: str, seed: int, minutes: float) -> tuple[Series, Checker]:
    """Put a steady load on two workers; return each figure over time, in hours."""
    series: Series = defaultdict(list)
    calls = planning.make(seed, minutes * 60, RATE, store, "redis").calls
    with tempfile.TemporaryDirectory(prefix="soak-") as directory:
        servers = Servers(store, "redis", Path(directory))
        try:
            with Arena(servers, Path(directory)) as arena:
                playing = threading.Thread(target=arena.play, args=(planning.Plan(calls, []),))
                playing.start()
                begun, pause = time.time(), minutes * 60 / SAMPLES
                while playing.is_alive():
                    playing.join(pause)
                    if playing.is_alive() and time.time() - begun > minutes * 60 / 3:  # it is warm
                        for name, value in _sample(arena).items():
                            series[name].append(((time.time() - begun) / 3600, value))
                arena.rest(lambda: not missing(arena.notes()), quiet_s=30, longest_s=60)
                windows: dict[int, list[float]] = defaultdict(list)
                for at, seconds in _latencies(arena):
                    windows[int((at - begun) / pause / 4)].append(seconds * 1000)
                for n, some in sorted(windows.items())[5:-1]:
                    p99 = statistics.quantiles(some, n=100)[98]
                    series["p99 from call to effect, ms"].append((n * pause * 4 / 3600, p99))
                found = Checker(arena.notes(), store=store, broker="redis", library="ours")
        finally:
            servers.close()
    return series, found


def rows(store: str, seed: int, minutes: float) -> list[Row]:
    series, checked = soak(store, seed, minutes)
    about = {"name": "soak", "command": f"python -m tests.proof.soak --minutes {minutes:g}"}
    found = [
        Row(
            what=f"{store}, {minutes:g} minutes at {RATE} calls a second",
            how_many=f"{checked.calls} calls",
            found=f"{len(checked.lost) + len(checked.doubled) + len(checked.wrong)} lost, doubled or wrong",
            held=not checked.wrong,
            **about,
        )
    ]
    for name, values in series.items():
        hours, figures = zip(*values, strict=True)
        slope, mean = statistics.linear_regression(hours, figures).slope, statistics.mean(figures)
        growth = slope * (hours[-1] - hours[0]) / mean
        # p99 is that of the machine, too.
        is_flat = growth < (0.5 if name.startswith("p99") else GROWTH)
        told = f"{mean:.4g} on average, slope {slope:+.3g} an hour ({growth:+.1%} in the time)"
        found.append(
            Row(
                what=f"{store}: {name}",
                how_many=f"{len(values)} samples",
                found=told,
                held=is_flat,
                **about,
            )
        )
    return found


def run(options: Options) -> list[Row]:
    """Soak each store for half an hour; nothing without ``--full``."""
    each = 60 / len(STORES)
    return [row for store in STORES if options.full for row in rows(store, options.seed, each)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    found = [row for store in STORES for row in rows(store, args.seed, args.minutes / len(STORES))]
    for row in found:
        sys.stdout.write(
            f"| {row.what} | {row.how_many} | {row.found} | {'held' if row.held else 'NOT HELD'} |\n"
        )
    return not all(row.held for row in found)


if __name__ == "__main__":
    sys.exit(main())
