"""Threads of a test: many that start together, and one that has no connection yet."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import TypeVar

T = TypeVar("T")


def all_at_once(count: int, do: Callable[[int], T]) -> list[T]:
    """Call ``do(0)`` to ``do(count - 1)``, each in a thread of its own, all started together."""
    with crowd(count) as together:
        return together(do)


@contextlib.contextmanager
def crowd(count: int) -> Iterator[Callable[[Callable[[int], T]], list[T]]]:
    """Give :func:`all_at_once` for several rounds: the same threads, whose connections are open from the second on."""
    barrier = Barrier(count)  # none goes on before each has come, so none comes twice in a round
    with ThreadPoolExecutor(count) as threads:

        def together(do: Callable[[int], T]) -> list[T]:
            def run(number: int) -> T:
                barrier.wait()
                return do(number)

            return list(threads.map(run, range(count)))

        yield together


def in_background(do: Callable[[], T]) -> Future[T]:
    """Call ``do`` in a thread of its own, which ends with it."""
    pool = ThreadPoolExecutor(1)
    future = pool.submit(do)
    pool.shutdown(wait=False)
    return future
