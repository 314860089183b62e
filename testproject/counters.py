"""One line of JSON per outcome of an idempotent task, in a file that every process appends to."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from celery_idempotent import signals
from celery_idempotent.signals import Event

__all__ = ["OUTCOMES", "connect", "count", "swept"]

#: The names of the signals that are written down.
OUTCOMES = (
    "claimed",
    "replayed",
    "conflicted",
    "mismatched",
    "settled",
    "released",
    "interrupted",
    "lease_lost",
    "swept",
    "settle_failed",
    "store_failed",
)


def connect(path: Path) -> None:
    """Write every outcome in this process, and in those it forks, to the end of ``path``."""
    for outcome in OUTCOMES:
        receiver = functools.partial(_append, path, outcome)
        getattr(signals, outcome).connect(receiver, weak=False, dispatch_uid=f"counters.{outcome}")


def count(path: Path, *, task: str | None = None) -> Counter[str]:
    """How often each outcome was written, for one task or for all of them."""
    found = (entry for entry in _entries(path) if task is None or entry["task"] == task)
    return Counter(entry["outcome"] for entry in found)


def swept(path: Path) -> int:
    """How many records the sweeps interrupted."""
    return sum(entry["count"] for entry in _entries(path) if entry["outcome"] == "swept")


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        yield from map(json.loads, path.read_text().splitlines())


def _append(path: Path, outcome: str, event: Event, **_: Any) -> None:
    entry = {
        "outcome": outcome,
        "task": event.task,
        "task_id": event.task_id,
        "key": event.identity.key if event.identity else None,
        "token": event.record.token if event.record else None,
        "error": repr(event.error) if event.error else None,
        "count": event.count,
        "pid": os.getpid(),
    }
    # One write of one short line to a file opened for appending: processes do not mix their lines,
    # and one that is killed leaves a whole line or none.
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, json.dumps(entry).encode() + b"\n")
    finally:
        os.close(fd)
