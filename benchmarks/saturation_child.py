"""Has processes claim and settle keys as fast as they can: ``saturation_child URL SECONDS CLIENTS WITH_RESULT``.

Prints one JSON object: how many pairs they did, in how many seconds, how long the server's main thread worked, and how
long a pair took.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from typing import Any

import redis

from benchmarks.figures import percentile
from benchmarks.operations import claim, prepared_settle_with_result, settle
from celery_idempotent.records import Identity, Record, SettledWith
from celery_idempotent.stores.redis.store import RedisStore

_WARM = 200
_PATIENCE_S = 120


def main(url: str, seconds: int, clients: int, with_result: int) -> None:
    """Start the clients, and look at the server when all begin and when the last has ended."""
    # Forked: one import for all, and nothing here has a thread or a connection yet.
    forked = multiprocessing.get_context("fork")
    barrier = forked.Barrier(clients + 1)
    pipes = [forked.Pipe(duplex=False) for _ in range(clients)]
    settle_it = _settle_with_result if with_result else settle
    for n, (_, answer) in enumerate(pipes):
        arguments = (url, n, seconds, settle_it, barrier, answer)
        forked.Process(target=_work, args=arguments, daemon=True).start()
    with redis.Redis.from_url(url) as client:
        barrier.wait(_PATIENCE_S)
        began, (user, kernel) = time.perf_counter(), main_thread_s(client)
        barrier.wait(_PATIENCE_S + seconds)
        took, ended = time.perf_counter() - began, main_thread_s(client)
    times = [each for answers, _ in pipes for each in answers.recv()]
    print(
        json.dumps(
            {
                "pairs": len(times),
                "seconds": took,
                "user_s": ended[0] - user,
                "kernel_s": ended[1] - kernel,
                "p50_us": percentile(times, 50) / 1000,
                "p99_us": percentile(times, 99) / 1000,
            }
        ),
        flush=True,
    )


def main_thread_s(client: redis.Redis) -> tuple[float, float]:
    """Return how long the thread that runs all commands worked, in its own code and in the kernel."""
    info: Any = client.info("cpu")
    return info["used_cpu_user_main_thread"], info["used_cpu_sys_main_thread"]


def _work(
    url: str,
    client: int,
    seconds: int,
    settle_it: Callable[[RedisStore, Record], object],
    barrier: Barrier,
    answer: Connection,
) -> None:
    store = RedisStore(url)

    def pair(key: str) -> None:
        settle_it(store, claim(store, Identity(namespace="shop.tasks.charge", key=key)))

    for n in range(_WARM):
        pair(f"warm-{client}-{n}")
    barrier.wait(_PATIENCE_S)
    clock = time.perf_counter_ns
    times: list[int] = []
    before = clock()
    end = before + seconds * 1_000_000_000
    while before < end:
        pair(f"order-{client:03}-{len(times):030}")
        after = clock()
        times.append(after - before)
        before = after
    barrier.wait(_PATIENCE_S + seconds)
    answer.send(times)
    store.close()


def _settle_with_result(store: RedisStore, record: Record) -> None:
    assert prepared_settle_with_result(store, record)() is SettledWith.RESULT


if __name__ == "__main__":
    address, *numbers = sys.argv[1:]
    main(address, *map(int, numbers))
