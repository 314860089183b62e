"""Times the verbs in a process of its own, where hiredis can be left out; prints one JSON object a round."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence

if not os.environ.get("BENCH_HIREDIS"):
    sys.modules["hiredis"] = None  # type: ignore[assignment]  # its import now fails, as if not installed

from benchmarks.operations import Operations


def main(url: str, rounds: int, calls: int, seed: int) -> None:
    """Time ``calls`` of each verb, in another order each round; the first round warms up."""
    operations, order = Operations(url), random.Random(seed)
    for number in range(-1, rounds):
        names = order.sample(operations.names, len(operations.names))
        times = {name: _time(operations.prepare(name, calls)) for name in names}
        if number >= 0:
            print(json.dumps({name: times[name] for name in operations.names}), flush=True)


def _time(calls: Sequence[Callable[[], object]]) -> list[int]:
    clock, times = time.perf_counter_ns, []
    for call in calls:
        before = clock()
        call()
        times.append(clock() - before)
    return times


if __name__ == "__main__":
    url, *numbers = sys.argv[1:]
    main(url, *map(int, numbers))
