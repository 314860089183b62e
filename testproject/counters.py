"""One line of JSON per outcome of an idempotent task, in a file that every process appends to."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from celery_idempotent import signals
from celery_idempotent.signals import Event

__all__ = ["connect", "count"]

_OUTCOMES = ("claimed", "replayed", "conflicted", "interrupted", "swept")


def connect(path: Path) -> None:
    """Write every outcome in this process, and in those it forks, to the end of ``path``."""
    for outcome in _OUTCOMES:
        receiver = functools.partial(_append, path, outcome)
        getattr(signals, outcome).connect(receiver, weak=False, dispatch_uid=f"counters.{outcome}")


def count(path: Path) -> Counter[str]:
    """How often there was each outcome; ``"swept"`` is how many records the sweeps interrupted."""
    counts: Counter[str] = Counter()
    if path.exists():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            counts[entry["outcome"]] += entry["count"]
    return counts


def _append(path: Path, outcome: str, event: Event, **_: Any) -> None:
    entry = {"outcome": outcome, "count": event.count if outcome == "swept" else 1}
    # One write of one short line to a file opened for appending: processes do not mix their lines,
    # and one that is killed leaves a whole line or none.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(fd)
