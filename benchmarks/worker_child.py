"""The app of the worker under test: ``celery -A benchmarks.worker_child worker``."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.tasks import make_app

app = make_app(
    broker=os.environ["BENCH_BROKER"],
    backend=os.environ["BENCH_BACKEND"],
    stamps=Path(os.environ["BENCH_STAMPS"]),
    peers=bool(os.environ.get("BENCH_PEERS")),
)
