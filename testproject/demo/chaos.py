"""Kills the worker, or one of its pool processes, while tasks are at work and have not written."""

from __future__ import annotations

import contextlib
import enum
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass

from django.db.models import Max

from testproject.demo.broker import Broker
from testproject.demo.gate import Gate
from testproject.demo.processes import Child
from testproject.webhooks.models import Kind, Run

__all__ = ["Killer", "Strike", "Target"]

_PATIENCE_S = 2.5
_LOOK_S = 0.02
_LOOKS = 3
#: A task is given up as poison after three crashes (idempotency_max_crashes): stay below.
_CRASHES = 2


class Target(enum.Enum):
    """What a SIGKILL is sent to."""

    WORKER = "the worker"
    PROCESS = "a pool process"


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A kill, and how many runs of each kind it ended before their write."""

    target: Target
    plain: int
    idempotent: int


class Killer:
    """Owns the worker: starts it, kills it, starts it again."""

    def __init__(
        self, worker: Child, *, processes: int, gate: Gate, broker: Broker, chance: random.Random
    ) -> None:
        self.strikes: list[Strike] = []
        self._worker = worker
        self._processes = processes
        self._gate = gate
        self._broker = broker
        self._chance = chance
        self._crashes: Counter[str] = Counter()
        self._killed: set[int] = set()
        self._earlier = 0

    def start_worker(self) -> None:
        """Start the worker; runs up to now are not its own."""
        self._earlier = Run.objects.aggregate(last=Max("pk"))["last"] or 0
        self._worker.start()

    def restart_worker(self) -> None:
        """Stop the worker warmly and start it again: it restores, at its start, what is overdue."""
        self._worker.stop(grace_s=10)
        self.start_worker()

    def strike(self, target: Target) -> Strike | None:
        """Kill at the next good moment, or not at all if none comes within some seconds."""
        with self._gate.closed():
            victims = self._wait_for_victims(target)
            if not victims:
                return None
            if target is Target.WORKER:
                self._worker.kill()
            else:
                for run in victims:
                    # Should it have been replaced this moment, there is nobody to kill.
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(run.pid, signal.SIGKILL)
        self._crashes.update(str(run.delivery_id) for run in victims)
        self._killed.update(run.pk for run in victims)
        strike = Strike(
            target=target,
            plain=sum(run.kind == Kind.PLAIN for run in victims),
            idempotent=sum(run.kind == Kind.IDEMPOTENT for run in victims),
        )
        self.strikes.append(strike)
        if target is Target.WORKER:
            self.start_worker()
        return strike

    def at_work(self) -> list[Run]:
        """The runs that have started and not written, of pool processes that are there.

        A pool process runs one task at a time: what it started last is what it is at. One that was
        killed is there until its parent has noticed, which can take Celery five seconds.
        """
        latest = (
            Run.objects.filter(pk__gt=self._earlier).values("pid").annotate(last=Max("pk"))
        ).values("last")
        unwritten = Run.objects.filter(pk__in=latest, entry__isnull=True)
        return [run for run in unwritten if _alive(run.pid)]

    def _wait_for_victims(self, target: Target) -> list[Run]:
        """Look who is at work, until somebody is to be killed or nothing will change any more."""
        deadline = time.monotonic() + _PATIENCE_S
        looks = 0
        while time.monotonic() < deadline:
            self._worker.check()
            runs = self.at_work()
            alive = [run for run in runs if run.pk not in self._killed]
            idempotent = [run for run in alive if run.kind == Kind.IDEMPOTENT]
            good = [run for run in idempotent if self._may_crash(run)]
            if target is Target.PROCESS and good:
                return [self._chance.choice(good)]
            # All are at the gate, or on their way to it: nobody new comes while it is closed.
            full = len(runs) == self._processes
            if full and not (good and good == idempotent):
                return []
            # The worker: only when it fetches nothing more. Seen repeatedly, since what it fetched
            # last may be on its way from the socket to "unacked".
            looks = looks + 1 if full and not self._broker.fetching() else 0
            if looks == _LOOKS:
                return alive
            time.sleep(_LOOK_S)
        return []

    def _may_crash(self, run: Run) -> bool:
        return self._crashes[str(run.delivery_id)] < _CRASHES


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True
