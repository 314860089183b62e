"""Times the verbs in a process of its own, where hiredis can be left out."""

from __future__ import annotations

import os
import sys

if not os.environ.get("BENCH_HIREDIS"):
    sys.modules["hiredis"] = None  # type: ignore[assignment]  # its import now fails, as if not installed

from benchmarks.operations import redis_operations, time_in_rounds

if __name__ == "__main__":
    url, *numbers = sys.argv[1:]
    time_in_rounds(redis_operations(url), *map(int, numbers))
