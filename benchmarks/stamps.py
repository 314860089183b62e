"""When each message was started, and whether its body ran: a file that all processes of a worker map into memory."""

from __future__ import annotations

import mmap
import os
import struct
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

_STARTED = struct.Struct("=QQQ")
_RAN = struct.Struct("=Q")
_SLOT = struct.Struct("=QQQQ")


@dataclass(frozen=True, slots=True)
class Stamp:
    """The two clocks of the process that started a message, in nanoseconds."""

    wall: int
    cpu: int
    pid: int
    runs: int


class Stamps:
    """One slot for each message, by its number."""

    def __init__(self, path: Path, slots: int | None = None) -> None:
        if slots is not None:
            with path.open("wb") as file:
                file.truncate(slots * _SLOT.size)
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)

    def start(self, number: int) -> None:
        """Note that this process is about to call task ``number``. The clock is one for all processes."""
        clocks = time.perf_counter_ns(), time.process_time_ns(), os.getpid()
        _STARTED.pack_into(self._map, number * _SLOT.size, *clocks)

    def run(self, number: int) -> None:
        """Note that the body of task ``number`` runs, once more if it has run."""
        place = number * _SLOT.size + _STARTED.size
        _RAN.pack_into(self._map, place, _RAN.unpack_from(self._map, place)[0] + 1)

    def started(self) -> int:
        """Count the messages that were started."""
        return sum(1 for slot in _SLOT.iter_unpack(self._map) if slot[0])

    def read(self, numbers: Sequence[int]) -> list[Stamp]:
        """Return the stamps of these messages."""
        slots = (_SLOT.unpack_from(self._map, number * _SLOT.size) for number in numbers)
        return [Stamp(wall, cpu, pid, runs) for wall, cpu, pid, runs in slots]


def wall_per_task(block: Sequence[Stamp]) -> float:
    """Return the time from one start to the next, in microseconds: all that a worker does for a message."""
    walls = [stamp.wall for stamp in block]
    return (max(walls) - min(walls)) / (len(walls) - 1) / 1000


def cpu_per_task(block: Sequence[Stamp]) -> float:
    """Return the CPU time of the processes that ran the tasks, from one start to the next, in microseconds."""
    by_pid: dict[int, list[int]] = {}
    for stamp in block:
        by_pid.setdefault(stamp.pid, []).append(stamp.cpu)
    steps = [after - before for cpus in by_pid.values() for before, after in pairwise(sorted(cpus))]
    return sum(steps) / len(steps) / 1000
