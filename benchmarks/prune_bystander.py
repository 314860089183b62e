"""Claims and settles keys of its own until its stdin ends, then says how long each pair took."""

from __future__ import annotations

import json
import sys
import threading
import time

from benchmarks.figures import percentile
from benchmarks.operations import claim, settle
from benchmarks.postgresql import set_up
from celery_idempotent.records import Identity


def main(name: str) -> None:
    """Say once that it is at work, and in the end the figures."""
    set_up(default=name)
    from celery_idempotent.django.store import DjangoStore

    times: list[float] = []
    store, over = DjangoStore(), threading.Event()

    def wait() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait, daemon=True).start()
    warm = False
    while not over.is_set():
        identity = Identity(namespace="bystander", key=f"{time.time_ns()}")
        before = time.perf_counter()
        settle(store, claim(store, identity))
        times.append(time.perf_counter() - before)
        if not warm and len(times) > 20:
            warm = True
            times.clear()
            print("at work", flush=True)
        time.sleep(0.001)
    store.close()
    times = times or [0.0]
    figures = {
        "bystander_p50_ms": percentile(times, 50) * 1000,
        "bystander_p99_ms": percentile(times, 99) * 1000,
        "bystander_max_ms": max(times) * 1000,
    }
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
